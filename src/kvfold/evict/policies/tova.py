"""tova: tokens that the last query looks at.

TOVA, Token Omission Via Attention (Oren et al., arXiv 2401.06104): the attention of the newest
query, averaged over the heads of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.cache.slots import Slots
from kvfold.evict.policy import Observation, Policy, register_policy


@register_policy("tova")
@dataclass(frozen=True, slots=True)
class TOVA(Policy):
    """Attention of the newest query alone."""

    summary = "the attention of the newest query (TOVA)"
    scopes = ("layer", "head", "token")
    fields = ("mass",)

    @property
    def window(self) -> int:
        """The last query."""
        return 1

    def observe(self, slots: Slots, seen: Observation) -> None:
        """Replace what the query before saw."""
        slots.field("mass").copy_(seen.probabilities[:, :, :, -1].mean(2))

    def score(self, slots: Slots) -> torch.Tensor:
        """The attention, `[B, G, T]`."""
        return slots.field("mass")
