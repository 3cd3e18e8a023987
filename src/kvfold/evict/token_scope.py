"""One kept set for all layers and heads.

Every layer holds the same tokens in the same slots. The kept cache then stays one dense set of
tokens, which is what makes a learned policy cheap (DistillCache, arXiv 2608.08878).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvfold.cache import Outcome
from kvfold.cache.layer import CacheLayer
from kvfold.evict.layer import EvictingLayer


class TokenScope:
    """Acts on the evicting layers of one cache together."""

    def before_forward(self, layers: list[CacheLayer], count: int) -> None:
        """Choose the slot that a single new token takes, the same in all layers."""
        evicting = evicting_of(layers)
        if not evicting or evicting[0].slots.is_empty:
            return
        for layer in evicting:
            layer.slots.thaw()
        if count > 1:
            return
        is_full = [layer.make_room() for layer in evicting]
        if all(is_full):
            chosen = evicting[0].choose_next(lambda: self._scores(evicting))
            for layer in evicting:
                layer.use(chosen.to(layer.slots.positions.device))

    def after_forward(self, layers: list[CacheLayer], outcome: Outcome | None) -> None:
        """Cut every layer to the budget, after a prompt or a chunk of one."""
        evicting = evicting_of(layers)
        if evicting and evicting[0].is_over:
            scores = self._scores(evicting)
            for layer in evicting:
                layer.cut(scores.to(layer.slots.positions.device))

    def _scores(self, evicting: Sequence[EvictingLayer]) -> torch.Tensor:
        return evicting[0].eviction.policy.score_together([layer.slots for layer in evicting])


def evicting_of(layers: Sequence[CacheLayer]) -> list[EvictingLayer]:
    """Those of a cache's layers that evict."""
    return [layer for layer in layers if isinstance(layer, EvictingLayer)]
