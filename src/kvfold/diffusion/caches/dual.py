"""dual: everything outside of the current block is frozen (Fast-dLLM, arXiv 2505.22618).

When a row enters a block, everything is computed; until it leaves it, only the block is recomputed,
against the keys and values of what stands before and of the masks that follow, as they were. A
sampler without blocks has one block, so that the prompt is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.diffusion.caches.cache import register_cache
from kvfold.diffusion.caches.tokens import TokenCache
from kvfold.diffusion.canvas import Canvas


@register_cache("dual")
@dataclass(frozen=True)
class DualCache(TokenCache):
    """Freezes what stands before and after the block."""

    summary = "what stands outside of the current block is frozen (Fast-dLLM)"

    def fresh(self, canvas: Canvas, shift: int) -> torch.Tensor:
        """The block, from the place that predicts its first token."""
        columns = torch.arange(canvas.width, device=canvas.ids.device)
        return (columns >= canvas.start[:, None] - shift) & (columns < canvas.end[:, None])
