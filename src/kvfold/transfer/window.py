"""The end of a prefix, read by the consumer itself over what was decoded of the rest.

Caches that go by queries look at those of a prompt's last tokens alone: the window. Nobody sends
queries, so the model reads the window. As it gets to a layer, that layer's keys and values of the
tokens before are decoded; the window's own attend to them, and the cache that is being filled is
told of all tokens at once, as in the prefill of a prompt that came in one piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.attention import LazyMask, Scoring, require_attached
from kvfold.cache import CacheLayer, KVCache, prefill
from kvfold.cache.split import SplitLayer

Decoded = Callable[[int], dict[str, torch.Tensor]]
"""What a full layer of that index holds of the tokens before, as `CacheLayer.load` takes it."""


class WindowLayer(CacheLayer):
    """Holds one layer of a prefix for as long as the window attends to it."""

    def __init__(self, before: int, decoded: Decoded, cache: KVCache, index: int) -> None:
        """Start empty.

        Args:
            before: Columns before the window.
            decoded: Gives them, when the model is there.
            cache: Is told of all tokens afterwards.
            index: Of the layer.
        """
        super().__init__()
        self.seen = before
        self._decoded, self._cache, self._index = decoded, cache, index

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All columns, although those before the window are not here yet."""
        return self.seen + query_length, 0

    def store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the window's tokens behind those before."""
        self.load(self._decoded(self._index), self.seen, has_evicted=False)
        super().store(keys, values)

    def attend(
        self, query: torch.Tensor, mask: LazyMask | torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Attention of the window; the layer then goes to the cache that is being filled."""
        output = super().attend(query, mask, scoring)
        assert isinstance(mask, LazyMask), "an attached model makes no other"
        keys, values = self.slots.keys, self.slots.values
        self.slots = self.slots.emptied()
        self._cache.update(keys, values, self._index)
        layer = self._cache.layers[self._index]
        if isinstance(layer, CacheLayer | SplitLayer):
            layer.witness(query, replace(mask, query_offset=0, query_length=self.seen), scoring)
        return output


def read_window(
    model: PreTrainedModel,
    cache: KVCache,
    ids: torch.Tensor,
    tokens: torch.Tensor | None,
    count: int,
    decoded: Decoded,
) -> None:
    """Let a cache hold a prefix of which the model reads the last columns alone.

    Args:
        model: An attached model.
        cache: Empty, and made for it.
        ids: Token ids of the prefix, `[B, T]`, left padded.
        tokens: False for padding, `[B, T]`; None where there is none.
        count: Columns of the window; one less than T at most.
        decoded: Gives the others.

    Raises:
        ConfigError: When the model is not attached.
    """
    require_attached(model)
    before = ids.shape[1] - count
    read = Cache(
        layers=[WindowLayer(before, decoded, cache, index) for index in range(len(cache.layers))]
    )
    attended = None if tokens is None else tokens.long()
    prefill(model, ids[:, before:], read, attention_mask=attended)
