"""One kept set for all layers and heads.

The scores of all layers are averaged. The kept cache then stays one dense set of tokens, which is
what makes a learned policy cheap (DistillCache, arXiv 2608.08878).
"""

from __future__ import annotations

import torch

from kvfold.cache.layer import CacheLayer
from kvfold.evict.layer import EvictingLayer


class TokenScope:
    """Acts on the evicting layers of one cache, which hold the same tokens in the same slots."""

    def before_forward(self, layers: list[CacheLayer], count: int) -> None:
        """Choose the slot that a single new token takes, the same in all layers."""
        evicting = _evicting(layers)
        if count > 1 or not evicting or evicting[0].slots.is_empty:
            return
        is_full = [layer.make_room() for layer in evicting]
        if all(is_full):
            scores = _mean_scores(evicting)
            for layer in evicting:
                layer.choose(scores.to(layer.slots.positions.device))

    def after_forward(self, layers: list[CacheLayer]) -> None:
        """Cut every layer to the budget, after a prompt or a chunk of one."""
        evicting = _evicting(layers)
        if evicting and evicting[0].is_over:
            scores = _mean_scores(evicting)
            for layer in evicting:
                layer.cut(scores.to(layer.slots.positions.device))


def _evicting(layers: list[CacheLayer]) -> list[EvictingLayer]:
    return [layer for layer in layers if isinstance(layer, EvictingLayer)]


def _mean_scores(layers: list[EvictingLayer]) -> torch.Tensor:
    total = layers[0].scores()
    for layer in layers[1:]:
        total = total + layer.scores().to(total.device)
    return total / len(layers)
