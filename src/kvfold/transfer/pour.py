"""A decoded prefix put into another kind of cache: one that keeps less of it.

What arrives are keys and values. What their tokens asked, and how surprising they were, is nowhere:
nobody ran the consumer over them. A cache that goes by keys, values and positions alone (full,
streaming, knorm, random) takes them as if they were a prompt. For one that says how many last
queries it wants (h2o, snapkv, tova, distill, sekv), the consumer reads so many tokens; see
`kvfold.transfer.window`. One that looks at queries without saying so is refused: it shows on a
copy that is told of two tokens, whose queries raise when they are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvfold.attention import LazyMask, Scoring
from kvfold.cache import CacheLayer, KVCache
from kvfold.cache.split import SplitLayer
from kvfold.errors import ConfigError
from kvfold.transfer.endpoint import Endpoint


class _QueriesWantedError(Exception):
    """Somebody looked at queries that nobody has."""


class _Unknown(torch.Tensor):
    """Queries of which shape, type and device are known, and no more."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _FACTS:
            raise _QueriesWantedError
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_FACTS = tuple(
    getattr(torch.Tensor, name).__get__ for name in ("shape", "device", "dtype", "is_cuda")
)


def queries_wanted(cache: KVCache) -> int:
    """Last queries of a prompt that a cache has to be told of; 0 where it goes by none."""
    return max((part.queries_wanted for part in cache.parts), default=0)


def require_pourable(cache: KVCache, endpoint: Endpoint) -> None:
    """Refuse a cache that cannot be filled from codes; it is left as it was.

    Args:
        cache: That is to be filled.
        endpoint: Of the model that it must be made for.

    Raises:
        ConfigError: When it holds tokens, is another model's, or looks at queries of which it does
            not say how many.
    """
    if cache.model is not endpoint.model:
        raise ConfigError(
            "the cache was made for another model: make one for the consumer with kvfold.make_cache"
        )
    if seen := cache.get_seq_length():
        raise ConfigError(f"the cache has seen {seen} tokens already: give an empty one")
    if queries_wanted(cache):
        return
    trial = cache.fork()
    try:
        for layer in endpoint.layers:
            heads = endpoint.anatomy.layers[layer].heads
            options = {"dtype": endpoint.model.dtype, "device": endpoint.model.device}
            keys = torch.zeros(1, heads.kv_heads, 2, heads.head_dim, **options)
            values = torch.zeros(1, heads.kv_heads, 2, heads.value_head_dim, **options)
            pour(trial, endpoint, layer, (keys, values), None)
        trial.end_of_forward()
    except _QueriesWantedError as error:
        raise ConfigError(
            f"{cache.spec.method} cannot be filled from codes, since its layers look at a prompt's "
            "queries and do not say how many they want: let queries_wanted say so, or use a "
            "method of kvfold's"
        ) from error


def pour(
    cache: KVCache,
    endpoint: Endpoint,
    layer: int,
    states: tuple[torch.Tensor, torch.Tensor],
    tokens: torch.Tensor | None,
) -> None:
    """Let one layer of a cache hold a prompt's keys and values.

    Args:
        cache: Empty in this layer.
        endpoint: The model that it is made for.
        layer: Index of the layer.
        states: Keys, rotated, and values, `[B, G, T, D]`.
        tokens: False for padding, `[B, T]`; None where there is none.
    """
    keys, values = states
    cache.update(keys, values, layer)
    held = cache.layers[layer]
    if isinstance(held, CacheLayer | SplitLayer):
        rows, _, count, width = keys.shape
        heads = endpoint.anatomy.layers[layer].heads.query_heads
        unknown = keys.new_zeros(1).expand(rows, heads, count, width).as_subclass(_Unknown)
        held.witness(unknown, LazyMask(0, count, padding=tokens), Scoring(width**-0.5))
