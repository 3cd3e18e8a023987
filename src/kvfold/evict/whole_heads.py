"""Heads that keep everything, while the others keep less within the same total.

DistillCache (arXiv 2608.08878, E.3) lets the most important 20 % of the kv heads keep every token.
Departures: 10 % by default, and never so many that they take more than a share of the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvfold.budget import ROUNDING, Budget

WHOLE = 0.1
"""Share of the kv heads that may keep everything by default."""
MOST = 0.6
"""Share of a budget that heads which keep everything may take."""


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """Which kv heads keep everything, and what the others may keep."""

    whole: Mapping[int, tuple[int, ...]]
    """Heads by layer; a layer that is missing has none."""
    rest: Budget
    """Of every other head."""

    def of_layer(self, layer: int, heads: int) -> tuple[list[int], list[int]]:
        """The heads of a layer that keep everything, and the others."""
        whole = list(self.whole.get(layer, ()))
        return whole, [head for head in range(heads) if head not in whole]


def plan_heads(importance: torch.Tensor, budget: Budget, share: float) -> HeadPlan:
    """Choose the heads that keep everything, so that the mean over all heads is the budget.

    Args:
        importance: Of each kv head, `[L, G]`; one that is not positive is never chosen.
        budget: A ratio. Tokens and bytes do not grow with a text as such a head does, so that
            under them none is chosen.
        share: Share of the kv heads that may be chosen.
    """
    total = importance.numel()
    most = min(share, MOST * budget.amount) if budget.unit == "ratio" else 0
    count = min(int(most * total * ROUNDING), int((importance > 0).sum()))
    if count == 0:
        return HeadPlan({}, budget)
    chosen = importance.flatten().argsort(descending=True, stable=True)[:count].tolist()
    whole: dict[int, tuple[int, ...]] = {}
    for number in sorted(chosen):
        layer, head = divmod(number, importance.shape[1])
        whole[layer] = (*whole.get(layer, ()), head)
    rest = (budget.amount * total - count) / (total - count)
    return HeadPlan(whole, Budget(min(rest, 1.0), "ratio"))
