"""One kept set for all layers and heads, decided when a forward is over.

The scores of all layers are averaged. The kept cache then stays one dense set of tokens, which is
what makes a learned policy cheap (DistillCache, arXiv 2608.08878).
"""

from __future__ import annotations

import torch

from kvfold.cache.layer import CacheLayer
from kvfold.evict.layer import EvictingLayer


def act_on_all_layers(layers: list[CacheLayer]) -> None:
    """Cut every layer to the budget, or choose the slot that the next token takes in all.

    Args:
        layers: The evicting layers of one cache, which hold the same tokens in the same slots.
    """
    evicting = [layer for layer in layers if isinstance(layer, EvictingLayer)]
    first = evicting[0]
    if not first.can_evict or first.slots.is_empty:
        return
    scores = _mean_scores(evicting)
    if first.is_over:
        for layer in evicting:
            layer.cut(scores)
    else:
        for layer in evicting:
            layer.choose(scores)


def _mean_scores(layers: list[EvictingLayer]) -> torch.Tensor:
    total = layers[0].scores()
    for layer in layers[1:]:
        total = total + layer.scores().to(total.device)
    return total / len(layers)
