"""h2o: tokens that have received the most attention so far.

H2O, Heavy-Hitter Oracle (Zhang et al., arXiv 2306.14048): scores are attention mass accumulated
over queries. Departures: of a prompt only the last `window` queries are counted, so that a long one
never needs its whole attention matrix; recent tokens are the protected set's, not half the budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.cache.slots import Slots
from kvfold.evict.options import whole_number
from kvfold.evict.policy import Observation, Policy, register_policy


@register_policy("h2o")
@dataclass(frozen=True, slots=True)
class H2O(Policy):
    """Accumulated attention mass a kv head."""

    queries: int = 64
    """Last queries of each prompt or chunk that are counted; every generated token is."""

    summary = "the most attention mass accumulated so far (H2O)"
    fields = ("mass",)

    def __post_init__(self) -> None:
        """Check the options."""
        whole_number("h2o", "queries", self.queries, least=1)

    @property
    def window(self) -> int:
        """Queries of a prompt that are looked at."""
        return self.queries

    def observe(self, slots: Slots, seen: Observation) -> None:
        """Add the mass, averaged over the query heads of a kv head."""
        slots.field("mass").add_(seen.mass(), alpha=1 / seen.heads)

    def score(self, slots: Slots) -> torch.Tensor:
        """The mass, `[B, G, T]`."""
        return slots.field("mass")
