"""Telling one cache what another has heard, without running the model again."""

from __future__ import annotations

import torch

from kvfold.attention import LazyMask, Scoring
from kvfold.cache.cache import KVCache
from kvfold.cache.layer import CacheLayer

Heard = tuple[torch.Tensor, LazyMask | torch.Tensor | None, Scoring]


class RecordingLayer(CacheLayer):
    """Keeps every token, and what its first forward was asked."""

    heard: Heard | None = None

    def attend(
        self, query: torch.Tensor, mask: LazyMask | torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Attention as ever; the first arguments are noted."""
        if self.heard is None:
            self.heard = (query, mask, scoring)
        return super().attend(query, mask, scoring)


def replay(source: KVCache, cache: KVCache) -> None:
    """Let a cache hold the prompt that another one was given in its first forward.

    Args:
        source: Made of `RecordingLayer`; later tokens are left out.
        cache: Empty, made for the same model; all its layers are kvfold's.
    """
    for index, (recorded, layer) in enumerate(
        zip(source.own_layers, cache.own_layers, strict=True)
    ):
        assert isinstance(recorded, RecordingLayer), "the source is made of them"
        assert recorded.heard is not None, "it has read a prompt"
        width = recorded.heard[0].shape[2]
        keys, values = recorded.slots.keys[:, :, :width], recorded.slots.values[:, :, :width]
        cache.update(keys.clone(), values.clone(), index)
        layer.attend(*recorded.heard)
    cache.end_of_forward()
