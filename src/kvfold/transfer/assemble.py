"""A consumer's cache, layer by layer, of states without position."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvfold.cache import CacheLayer, CacheSpec, KVCache, prefill
from kvfold.cache.slots import POSITION_DTYPE
from kvfold.errors import TransferError
from kvfold.ops.selection import EMPTY
from kvfold.transfer.endpoint import Endpoint, positions_of
from kvfold.transfer.pour import pour
from kvfold.transfer.window import read_window


def full_cache(model: PreTrainedModel) -> KVCache:
    """An empty cache of an attached model that keeps everything.

    It says of itself what `kvfold.make_cache(model, "full")` does, so that it can be saved and read
    back.
    """
    return KVCache(model, CacheSpec("full", "1.0", "layer"), CacheLayer)


class Assembly:
    """A cache of a model while its layers come in: in any order, unless another is filled.

    Example:
        >>> assembly = Assembly(endpoint, [len(ids)])  # doctest: +SKIP
        >>> for layer in endpoint.layers:  # doctest: +SKIP
        ...     assembly.put(layer, trace.keys(layer), trace.values(layer))
        >>> cache = assembly.finish()  # doctest: +SKIP
    """

    def __init__(
        self,
        endpoint: Endpoint,
        lengths: Sequence[int],
        into: KVCache | None = None,
        *,
        width: int | None = None,
    ) -> None:
        """Start an empty cache.

        Args:
            endpoint: An attached model.
            lengths: Tokens of each row; shorter rows are padded on the left.
            into: An empty cache to be filled, layer after layer in their order; see
                `kvfold.transfer.pour`. A full one without it.
            width: Columns of the rows, padding included; the longest row's without it.

        Raises:
            ConfigError: When the model is not attached.
        """
        self._endpoint = endpoint
        self._is_poured = into is not None
        self._cache = full_cache(endpoint.model) if into is None else into
        self._device = endpoint.model.device
        self._length = max(lengths) if width is None else width
        self._lengths = torch.tensor(lengths, device=self._device)
        columns = torch.arange(self._length, device=self._device)
        tokens = columns >= (self._length - self._lengths)[:, None]
        self._tokens = None if bool(tokens.all()) else tokens
        positions = positions_of(self._length, self._tokens, self._device)
        self._turns = endpoint.turns(positions)
        empty = positions if self._tokens is None else positions.masked_fill(~tokens, EMPTY)
        self._places = empty.expand(len(lengths), -1)[:, None].to(POSITION_DTYPE)
        self._missing = set(endpoint.layers)

    @torch.no_grad()
    def put(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put one layer's states in.

        Args:
            layer: Index of the layer.
            keys: Before RoPE, one row a token, `[N, G * D]`.
            values: `[N, G * D]`.

        Raises:
            TransferError: When the layer is there already, or the model has no such layer.
        """
        if layer not in self._missing:
            raise TransferError(f"layer {layer} came twice, or the model has none: ask again")
        states = self._states(layer, keys, values)
        if self._is_poured:
            pour(self._cache, self._endpoint, layer, states, self._tokens)
        else:
            self._fill(self._cache.layers[layer], *states)
        self._missing.discard(layer)

    @torch.no_grad()
    def read(
        self,
        ids: torch.Tensor,
        count: int,
        rows_of: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Put all layers into the cache that is filled, and let the model read the last tokens.

        A prefix that is no longer than they are is read whole.

        Args:
            ids: Token ids of the prefix, `[B, T]`.
            count: Last columns that are read.
            rows_of: Gives a layer's states, as `put` takes them; those of the last columns are left
                out.
        """
        ids = ids.to(self._device)
        before = self._length - count

        def decoded(layer: int) -> dict[str, torch.Tensor]:
            keys, values = self._states(layer, *rows_of(layer))
            return self._tensors(keys[:, :, :before], values[:, :, :before])

        if before > 0:
            read_window(self._endpoint.model, self._cache, ids, self._tokens, count, decoded)
        else:
            attended = None if self._tokens is None else self._tokens.long()
            prefill(self._endpoint.model, ids, self._cache, attention_mask=attended)
        self._missing.clear()

    def finish(self) -> KVCache:
        """The cache, ready for `generate` with a prompt that goes on after the prefix.

        Raises:
            TransferError: When a layer is missing.
        """
        if self._missing:
            raise TransferError(f"layers {sorted(self._missing)} did not arrive: ask again")
        self._cache.end_of_forward()
        return self._cache

    def _states(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a layer as its keys, rotated, and values, `[B, G, T, D]`."""
        turned = self._endpoint.turn(layer, self._heads(layer, keys), self._turns)
        dtype = self._endpoint.model.dtype
        return turned.to(dtype), self._heads(layer, values).to(dtype)

    def _tensors(self, keys: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a full layer holds of the first columns, `[B, G, N, D]`."""
        count = keys.shape[2]
        places = self._places[..., :count].clone()
        tensors = {"keys": keys, "values": values, "positions": places}
        if self._tokens is not None:
            tensors["lengths"] = self._tokens[:, :count].sum(-1)
        return tensors

    def _heads(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows `[N, G * D]` as `[B, G, T, D]`, zeros for padding."""
        batch = len(self._lengths)
        if self._tokens is None:
            padded = rows.view(batch, self._length, -1)
        else:
            padded = rows.new_zeros(batch, self._length, rows.shape[1])
            padded[self._tokens] = rows
        heads = self._endpoint.anatomy.layers[layer].heads.kv_heads
        return padded.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous()

    def _fill(self, layer: object, keys: torch.Tensor, values: torch.Tensor) -> None:
        if isinstance(layer, DynamicLayer):
            # A windowed layer keeps what its window holds.
            layer.update(keys, values)
            return
        assert isinstance(layer, CacheLayer)
        layer.load(self._tensors(keys, values), self._length, has_evicted=False)
