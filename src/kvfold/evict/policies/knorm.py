"""knorm: tokens whose key is short.

Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression"
(arXiv 2406.11430): keys of low norm tend to receive much attention. It never looks at attention.
Departure: of keys that are all but equally long, the older goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.cache.slots import Slots
from kvfold.evict.policy import NewTokens, Policy, register_policy

_TIE = 1e-5
"""A token's worth in norm of being one position newer. The same word has the same norm in the first
layer up to rounding; this outweighs the rounding, so that the older one goes first."""


@register_policy("knorm")
@dataclass(frozen=True, slots=True)
class KeyNorm(Policy):
    """Negative norm of the key."""

    summary = "the shortest keys (L2 norm)"
    fields = ("norm",)

    def start(self, tokens: NewTokens) -> dict[str, torch.Tensor]:
        """Measure the new keys once."""
        norms = torch.linalg.vector_norm(tokens.keys, dim=-1, dtype=torch.float32)
        return {"norm": norms - _TIE * tokens.positions[:, None]}

    def score(self, slots: Slots) -> torch.Tensor:
        """Minus the norm, `[B, G, T]`."""
        return -slots.field("norm")
