"""snapkv: tokens that the last queries look at, their neighbours included.

SnapKV (Li et al., arXiv 2404.14469): the mass received from the last `queries` queries of a prompt,
a token counting as much as the best of its neighbours (max pooling; window 32 and kernel 7 as in
the paper's LongBench runs). The paper compresses a prompt once and keeps all that is generated;
here the same mean goes on as an exponential window over the generated tokens' queries, so that the
budget holds for as long as one generates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.cache.slots import Slots
from kvfold.errors import ConfigError
from kvfold.evict.options import whole_number
from kvfold.evict.policy import Observation, Policy, register_policy
from kvfold.ops.statistics import pool_in_time


@register_policy("snapkv")
@dataclass(frozen=True, slots=True)
class SnapKV(Policy):
    """Pooled attention mass of the last queries a kv head."""

    queries: int = 32
    """Queries in the window."""
    kernel: int = 7
    """Neighbouring tokens that share a prompt token's mass; odd."""

    summary = "the attention of the last queries, pooled over neighbours (SnapKV)"
    fields = ("mass",)

    def __post_init__(self) -> None:
        """Check the options."""
        whole_number("snapkv", "queries", self.queries, least=1)
        whole_number("snapkv", "kernel", self.kernel, least=1)
        if self.kernel % 2 == 0:
            raise ConfigError(f"snapkv: kernel {self.kernel} is even, use an odd number such as 5")

    @property
    def window(self) -> int:
        """Queries of a prompt that are looked at."""
        return self.queries

    def observe(self, slots: Slots, seen: Observation) -> None:
        """Move the mean over the window on by the new queries."""
        mean = seen.mean_mass()
        if seen.probabilities.shape[3] > 1:
            mean = pool_in_time(mean, slots.positions, self.kernel, in_order=slots.in_order)
        slots.field("mass").lerp_(mean, seen.share_of(self.queries))

    def score(self, slots: Slots) -> torch.Tensor:
        """The mean mass, `[B, G, T]`."""
        return slots.field("mass")
