"""full: keep every token. The baseline of every comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.cache.slots import Slots
from kvfold.evict.policy import Policy, register_policy


@register_policy("full")
@dataclass(frozen=True, slots=True)
class Full(Policy):
    """Keeps everything, without copying the cache as it grows."""

    summary = "keep every token"
    scopes = ("layer",)
    evicts = False

    def score(self, slots: Slots) -> torch.Tensor:
        """Never asked for: nothing is evicted."""
        return torch.zeros_like(slots.positions, dtype=torch.float32)
