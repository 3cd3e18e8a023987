"""What one layer holds, kvfold's own or transformers'."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import DynamicLayer

from kvfold.cache.layer import CacheLayer
from kvfold.cache.split import SplitLayer


@dataclass(frozen=True, slots=True)
class Contents:
    """Tokens and bytes of one layer."""

    rows: int
    """Rows of the batch."""
    kept: int
    """Most tokens that a row holds; the mean over kv heads, rounded up, where they differ."""
    bytes_held: int
    """All its tensors on the fast tier."""
    bytes_slow: int
    """All its tensors on the slow tier."""
    bytes_index: int
    """The part that is positions, statistics and summaries."""
    bytes_full: int
    """Keys and values a full layer would hold."""


def contents_of(layer: object) -> Contents | None:
    """Count a layer; None when it holds nothing, or nothing that kvfold knows."""
    if isinstance(layer, CacheLayer | SplitLayer) and layer.is_initialized:
        return _together([_own(part) for part in layer.parts], _heads(layer))
    if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
        return _native(layer.keys, layer.values)
    return None


def _heads(layer: CacheLayer | SplitLayer) -> list[int]:
    return [part.slots.keys.shape[1] for part in layer.parts]


def _together(parts: list[Contents], heads: list[int]) -> Contents:
    held = sum(part.kept * count for part, count in zip(parts, heads, strict=True))
    return Contents(
        rows=parts[0].rows,
        kept=-(-held // sum(heads)),
        bytes_held=sum(part.bytes_held for part in parts),
        bytes_slow=sum(part.bytes_slow for part in parts),
        bytes_index=sum(part.bytes_index for part in parts),
        bytes_full=sum(part.bytes_full for part in parts),
    )


def _own(layer: CacheLayer) -> Contents:
    return Contents(
        rows=layer.slots.keys.shape[0],
        kept=int(layer.slots.counts.max()),
        bytes_held=layer.bytes_fast,
        bytes_slow=layer.bytes_slow,
        bytes_index=layer.bytes_index,
        bytes_full=layer.bytes_full,
    )


def _native(keys: torch.Tensor, values: torch.Tensor) -> Contents:
    held = keys.nbytes + values.nbytes
    return Contents(keys.shape[0], keys.shape[2], held, 0, 0, held)
