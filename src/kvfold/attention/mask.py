"""A mask that is evaluated late, at the positions a cache layer really holds.

transformers builds one dense mask for all layers from the physical length of a cache. After
eviction every layer and head holds other positions, so kvfold's mask function returns the rule
itself, and each layer asks it about its own keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvfold.errors import ConfigError

MaskFunction = Callable[..., Any]
"""From row, head, query and key column to what may see what, as transformers writes it."""
_DENSE_OPTIONS = ("local_size", "allow_is_causal_skip", "allow_is_bidirectional_skip", "use_vmap")


@dataclass(frozen=True, eq=False)
class LazyMask:
    """Which keys a query sees, as a rule over columns and a padding mask."""

    query_offset: int
    """Column of the first query."""
    query_length: int
    """Number of queries Q."""
    function: MaskFunction = causal_mask_function
    """The model's own rule: from row, head, query and key column to a boolean."""
    padding: torch.Tensor | None = None
    """True where a column holds a token, `[B, columns]`; without it every column does."""
    dense_arguments: dict[str, Any] = field(default_factory=dict)
    """What transformers' own dense mask of the same rule is built from."""

    @property
    def is_causal(self) -> bool:
        """Whether the rule is plain causality."""
        return self.function is causal_mask_function

    def new_tokens(self) -> torch.Tensor | None:
        """True where a query is a token and not padding, `[B, Q]`; None when all are."""
        if self.padding is None:
            return None
        return self.padding[:, self.query_offset : self.query_offset + self.query_length]

    def visible(self, positions: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Evaluate the rule at the keys that are held.

        Args:
            positions: Logical position of each key in its row (padding not counted), negative
                where a slot is empty: `[B, P, T]`.
            queries: Logical position of each query in its row, negative for padding: `[B, Q]` or
                `[1, Q]`. A padding query sees everything, so that its unused output stays finite.

        Returns:
            `[B, P, Q, T]`.
        """
        keys, rows = positions.unsqueeze(2), queries[:, None, :, None]
        seen = keys <= rows if self.is_causal else self._by_function(keys, rows)
        return (seen & (keys >= 0)) | (rows < 0)

    def _by_function(self, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        device = keys.device
        batch = torch.arange(keys.shape[0], device=device).view(-1, 1, 1, 1)
        head = torch.arange(keys.shape[1], device=device).view(1, -1, 1, 1)
        return self.function(batch, head, self._columns(queries), self._columns(keys))

    def _columns(self, positions: torch.Tensor) -> torch.Tensor:
        """Columns of logical positions: a row's tokens in order, its padding skipped."""
        positions = positions.clamp_min(0).long()
        if self.padding is None:
            return positions
        tokens_first = (~self.padding).to(torch.uint8).argsort(dim=1, stable=True)
        rows = torch.arange(tokens_first.shape[0], device=positions.device).view(-1, 1, 1, 1)
        return tokens_first[rows, positions]

    @cached_property
    def dense(self) -> torch.Tensor | None:
        """The mask that transformers builds for its own attention, for layers that are not ours."""
        return sdpa_mask(**self.dense_arguments)


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: object,
) -> LazyMask:
    """Stand in for transformers' mask functions: same arguments, a lazy mask back.

    Raises:
        ConfigError: When the attention mask does not reach the queries.
    """
    if attention_mask is not None and attention_mask.shape[1] < q_offset + q_length:
        raise ConfigError(
            f"attention_mask has {attention_mask.shape[1]} columns, but the cache has seen "
            f"{q_offset} tokens and {q_length} are new: pass the mask over all "
            f"{q_offset + q_length}"
        )
    if attention_mask is not None and bool(attention_mask.all()):
        attention_mask = None
    dense = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "device": device,
        **{name: options[name] for name in _DENSE_OPTIONS if name in options},
    }
    return LazyMask(int(q_offset), q_length, mask_function, attention_mask, dense)
