"""dkv: a token is frozen one step after it was decided (dKV-Cache-Decode, arXiv 2505.15781).

A token's keys and values move most when it is decided. So in the step after, it is computed once
more, now as the token it has become, and then no more. Undecided places are recomputed in every
step, the prompt in the first only, and everything in every `refresh`-th step (8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.diffusion.caches.cache import register_cache
from kvfold.diffusion.caches.tokens import TokenCache
from kvfold.diffusion.canvas import Canvas


@register_cache("dkv")
@dataclass(frozen=True)
class DelayedCache(TokenCache):
    """Freezes what has been decided, with a delay of one step."""

    summary = "a token is frozen one step after it was decided (dKV-Cache)"
    by_block = False

    refresh: int | None = 8
    """Steps from one recomputation of everything to the next; None for none."""

    def fresh(self, canvas: Canvas, shift: int) -> torch.Tensor:
        """What is undecided, and what was decided in the last step."""
        return canvas.masked | canvas.changed
