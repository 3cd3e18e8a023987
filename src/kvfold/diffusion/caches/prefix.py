"""prefix: everything before the current block is frozen (Fast-dLLM, arXiv 2505.22618).

When a row enters a block, everything is computed; until it leaves it, the keys and values before
the block stay as they were, and the block and all that follows are recomputed in every step. A
sampler without blocks has one block, so that the prompt is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.diffusion.caches.cache import register_cache
from kvfold.diffusion.caches.tokens import TokenCache
from kvfold.diffusion.canvas import Canvas


@register_cache("prefix")
@dataclass(frozen=True)
class PrefixCache(TokenCache):
    """Freezes what stands before the block."""

    summary = "what stands before the current block is frozen (Fast-dLLM)"

    def fresh(self, canvas: Canvas, shift: int) -> torch.Tensor:
        """The block and all that follows, from the place that predicts the block's first token."""
        columns = torch.arange(canvas.width, device=canvas.ids.device)
        return columns >= canvas.start[:, None] - shift
