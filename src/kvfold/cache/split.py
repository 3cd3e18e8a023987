"""A layer whose kv heads do not all keep alike: some are served by one layer, some by another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers.cache_utils import CacheLayerMixin

from kvfold.attention import LazyMask, Scoring, hand_over
from kvfold.cache.layer import CacheLayer


class SplitLayer(CacheLayerMixin):
    """Hands each part of its kv heads to a layer of their own.

    The parts see the same tokens and keep what they will. Keys, values and queries are divided as
    they come, and the outputs put together again; nothing that is stored is copied for it.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, parts: Sequence[tuple[Sequence[int], CacheLayer]]) -> None:
        """Start empty.

        Args:
            parts: Layers with the kv heads that each serves; together all heads, each once.
        """
        self._heads = tuple(torch.tensor(heads, dtype=torch.long) for heads, _ in parts)
        self.parts = tuple(layer for _, layer in parts)
        """The layers that hold the tokens."""
        self._back = torch.cat(self._heads).argsort()

    @property
    def heads(self) -> tuple[list[int], ...]:
        """The kv heads of each part."""
        return tuple(heads.tolist() for heads in self._heads)

    # What transformers reads ------------------------------------------------------------------

    # The base class keeps plain attributes; here no tensor holds the tokens of all heads.
    @property
    def keys(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """None: see the parts."""
        return None

    @property
    def values(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """None: see the parts."""
        return None

    @property
    def is_initialized(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a token was ever stored."""
        return self.parts[0].is_initialized

    @property
    def is_croppable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the newest tokens can always be taken back."""
        return all(part.is_croppable for part in self.parts)

    @property
    def seen(self) -> int:
        """Tokens seen, padding included."""
        return self.parts[0].seen

    @property
    def row_lengths(self) -> int | torch.Tensor:
        """Tokens seen by each row: one number, or one a row `[B]` where there was padding."""
        return self.parts[0].row_lengths

    @property
    def awaits_attention(self) -> bool:
        """Whether new tokens are stored whose attention was not asked for."""
        return any(part.awaits_attention for part in self.parts)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: the first tokens give the shape."""

    def get_seq_length(self) -> int:
        """Tokens seen, not tokens held."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots and offset of the first part; each evaluates masks by itself."""
        return self.parts[0].get_mask_sizes(query_length)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens and hand the layer to the attention call that follows.

        Args:
            key_states: `[B, G, N, D]`, rotated.
            value_states: `[B, G, N, D]`.
            *args: Ignored.
            **kwargs: What transformers passes on to the attention function.

        Returns:
            The new keys and values: no tensor holds those of all slots.
        """
        for heads, part in self._divided(key_states.device):
            part.store(key_states[:, heads], value_states[:, heads])
        hand_over(self, key_states, kwargs)
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, mask: LazyMask | torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Attention of new queries over what each part holds; see `CacheLayer.attend`."""
        outputs = [
            part.attend(own, mask, scaled).unflatten(1, (part.slots.keys.shape[1], -1))
            for part, own, scaled in self._queries(query, scoring)
        ]
        together = torch.cat(outputs, dim=1)
        return together.index_select(1, self._back).flatten(1, 2)

    def witness(
        self, query: torch.Tensor, mask: LazyMask | torch.Tensor | None, scoring: Scoring
    ) -> None:
        """Learn of several new tokens what `attend` would; see `CacheLayer.witness`."""
        for part, own, scaled in self._queries(query, scoring):
            part.witness(own, mask, scaled)

    def _queries(
        self, query: torch.Tensor, scoring: Scoring
    ) -> Iterator[tuple[CacheLayer, torch.Tensor, Scoring]]:
        """The queries `[B, H', Q, D]` of each part, and how it scores."""
        by_group = query.unflatten(1, (len(self._back), -1))
        numbers = torch.arange(query.shape[1], device=query.device).view(by_group.shape[1:3])
        for heads, part in self._divided(query.device):
            yield part, by_group[:, heads].flatten(1, 2), scoring.of_heads(numbers[heads].flatten())

    def _divided(self, device: torch.device) -> list[tuple[torch.Tensor, CacheLayer]]:
        self._heads = tuple(heads.to(device) for heads in self._heads)
        self._back = self._back.to(device)
        return list(zip(self._heads, self.parts, strict=True))

    # What is done to every part ---------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything."""
        for part in self.parts:
            part.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Take the newest tokens back; see `CacheLayer.crop`, which may refuse."""
        # The parts that refuse do so before any has changed.
        for part in sorted(self.parts, key=lambda part: part.is_croppable):
            part.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take row `beam_idx[i]` as row i, `[B]`."""
        for part in self.parts:
            part.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        for part in self.parts:
            part.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows, `[K]` indices or a `[B]` mask."""
        for part in self.parts:
            part.batch_select_indices(indices)

    def offload(self) -> None:
        """Refuse: a layer attends to what it holds, where it holds it."""
        self.parts[0].offload()

    def prefetch(self) -> None:
        """Nothing is offloaded."""
