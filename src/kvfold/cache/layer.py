"""One layer of a cache: the contract with transformers, and attention over what is held.

A layer has a logical length (tokens seen) and a physical one (slots in use). transformers is told
the logical one wherever it asks for positions; masks are evaluated by the layer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers.cache_utils import CacheLayerMixin

from kvfold.attention import LazyMask, Scoring, hand_over
from kvfold.attention.grouped import (
    attention_probabilities,
    blockwise_attention,
    causal_attention,
    weigh_values,
)
from kvfold.cache.forward import Forward
from kvfold.cache.slots import Slots, headroom
from kvfold.errors import ConfigError
from kvfold.ops.selection import EMPTY


class CacheLayer(CacheLayerMixin):
    """Keeps every token, in slots that are appended to without copying the rest.

    Layers that keep less derive from it and override `_insert` and `_settle`.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, slots: Slots | None = None) -> None:
        """Start empty.

        Args:
            slots: Where tokens stand; by default plain storage shared by all kv heads.
        """
        self.slots = Slots(shared=True) if slots is None else slots
        self.seen = 0
        self.lengths: torch.Tensor | None = None
        self.has_evicted = False
        self._inserted: slice | torch.Tensor = slice(0, 0)
        self.awaits_attention = False

    @property
    def parts(self) -> tuple[CacheLayer, ...]:
        """The layer itself: it serves all of its kv heads alike."""
        return (self,)

    # What is held -----------------------------------------------------------------------------

    @property
    def bytes_fast(self) -> int:
        """All tensors on the tier that attention reads."""
        return self.slots.nbytes

    @property
    def bytes_slow(self) -> int:
        """All tensors on the other tier; there is none here."""
        return 0

    @property
    def bytes_full(self) -> int:
        """Keys and values that a full layer would hold for the tokens seen, padding included."""
        return self.seen * self.slots.token_bytes

    @property
    def bytes_index(self) -> int:
        """The part of the fast bytes that is no key or value of an exact token."""
        return self.bytes_fast - self.slots.capacity * self.slots.token_bytes

    @property
    def queries_wanted(self) -> int:
        """Last queries of a prompt that it has to be told of; 0 for none."""
        return 0

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name."""
        yield from self.slots.state()
        if self.lengths is not None:
            yield "lengths", self.lengths

    def load(self, tensors: dict[str, torch.Tensor], seen: int, *, has_evicted: bool) -> None:
        """Take back what `state` gave.

        Args:
            tensors: By name.
            seen: Tokens seen, padding included.
            has_evicted: Whether a token was evicted or repacked.
        """
        self.lengths = tensors.pop("lengths", None)
        self.slots.load(tensors)
        self.seen, self.has_evicted = seen, has_evicted

    # What transformers reads ------------------------------------------------------------------

    # The base class keeps plain attributes; here they are views that follow the slots.
    @property
    def keys(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """`[B, G, T, D]`, None before the first token."""
        return None if self.slots.is_empty else self.slots.keys

    @property
    def values(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """`[B, G, T, D]`, None before the first token."""
        return None if self.slots.is_empty else self.slots.values

    @property
    def is_initialized(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a token was ever stored."""
        return not self.slots.is_empty

    @property
    def is_croppable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the newest tokens can always be taken back."""
        return True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: the first tokens give the shape."""

    def get_seq_length(self) -> int:
        """Tokens seen, not tokens held."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Slots and offset, as if the held tokens were the newest."""
        held = len(self.slots)
        return held + query_length, self.seen - held

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new tokens and hand the layer to the attention call that follows.

        A cache holds states and no graph: gradients do not flow through what is stored.

        Args:
            key_states: `[B, G, N, D]`, rotated.
            value_states: `[B, G, N, D]`.
            *args: Ignored.
            **kwargs: What transformers passes on to the attention function.

        Returns:
            Keys and values of all slots in use.
        """
        self.store(key_states, value_states)
        keys, values = self.slots.keys, self.slots.values
        hand_over(self, keys, kwargs)
        return keys, values

    def store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens, whose attention is to follow: `[B, G, N, D]`, keys rotated."""
        self._check_batch(keys)
        self.slots.thaw()
        self._inserted = self._insert(keys.detach(), values.detach())
        self.seen += keys.shape[2]
        self.awaits_attention = True

    def _check_batch(self, keys: torch.Tensor) -> None:
        rows = keys.shape[0] if self.slots.is_empty else self.slots.keys.shape[0]
        if keys.shape[0] != rows:
            raise ConfigError(
                f"the cache holds {rows} rows but the input has {keys.shape[0]}: use one cache a "
                "batch, or batch_repeat_interleave / batch_select_indices"
            )

    # Attention --------------------------------------------------------------------------------

    @property
    def row_lengths(self) -> int | torch.Tensor:
        """Tokens seen by each row: one number, or one a row `[B]` where there was padding."""
        return self.seen if self.lengths is None else self.lengths

    def attend(
        self, query: torch.Tensor, mask: LazyMask | torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Attention of new queries over the slots in use.

        Args:
            query: `[B, H, Q, D]`, rotated.
            mask: The model's rule; plain causality without it.
            scoring: How the model makes scores.

        Returns:
            `[B, H, Q, D]`.

        Raises:
            ConfigError: For a dense mask.
        """
        forward = self._begin(query, mask, scoring, query.shape[2])
        one = query.shape[2] == 1
        output = self._attend_one(forward) if one else self._attend_many(forward)
        self._settle(forward)
        return output

    def witness(
        self, query: torch.Tensor, mask: LazyMask | torch.Tensor | None, scoring: Scoring
    ) -> None:
        """Learn of several new tokens what `attend` would, where nobody wants its output.

        Args:
            query: `[B, H, Q, D]`, rotated: of as many tokens as the mask is for, or of the last of
                them alone, where the others' are not known; `queries_wanted` are enough.
            mask: The model's rule; plain causality without it.
            scoring: How the model makes scores.

        Raises:
            ConfigError: For a dense mask.
        """
        count = mask.query_length if isinstance(mask, LazyMask) else query.shape[2]
        self._settle(self._begin(query, mask, scoring, count))

    def _begin(
        self,
        query: torch.Tensor,
        mask: LazyMask | torch.Tensor | None,
        scoring: Scoring,
        count: int,
    ) -> Forward:
        """Give `count` new tokens their places."""
        self.awaits_attention = False
        if mask is None:
            mask = LazyMask(self.seen - count, count)
        if not isinstance(mask, LazyMask):
            raise ConfigError(
                "kvfold cannot use a prepared 4-dimensional attention mask: pass the "
                "2-dimensional attention_mask of tokens and padding"
            )
        forward = Forward(query, mask, self._place(mask, count), scoring)
        self._arrive(forward)
        return forward

    def _place(self, mask: LazyMask, count: int) -> torch.Tensor:
        """Give the new tokens their logical positions `[B, N]` (or `[1, N]`)."""
        tokens, start = mask.new_tokens(), self.seen - count
        self._check_mask(mask, start)
        if tokens is not None and bool((tokens[:, :-1] & ~tokens[:, 1:]).any()):
            raise ConfigError(
                "attention_mask has padding after a token: pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        if self.lengths is None and tokens is not None and not bool(tokens.all()):
            self.lengths = torch.full((tokens.shape[0],), start, device=tokens.device)
        if self.lengths is None:
            device = self.slots.positions.device
            positions = torch.arange(start, self.seen, device=device)[None]
        else:
            if tokens is None:
                tokens = self.lengths.new_ones((len(self.lengths), count), dtype=torch.bool)
            positions = self.lengths[:, None] + tokens.cumsum(-1) - 1
            positions = positions.masked_fill(~tokens, EMPTY)
            self.lengths = self.lengths + tokens.sum(-1)
            # Empty slots may stand between tokens.
            self.slots.in_order = False
        self.slots.place(self._inserted, positions)
        return positions

    def _check_mask(self, mask: LazyMask, start: int) -> None:
        """Refuse a mask that counts other earlier tokens than were stored.

        Raises:
            ConfigError: Saying to pass the mask of all turns.
        """
        if start == 0 or (mask.padding is None and self.lengths is None):
            return
        device = self.slots.positions.device
        stored = torch.as_tensor(start, device=device) if self.lengths is None else self.lengths
        said = stored.new_tensor(start) if mask.padding is None else mask.padding[:, :start].sum(-1)
        if bool((said != stored).any()):
            raise ConfigError(
                "attention_mask (or leaving it out) counts other tokens than this cache has stored "
                "in some row: pass the mask over all turns, the padding of earlier ones included"
            )

    def _all_visible(self, mask: LazyMask) -> bool:
        """Whether a newest token sees every slot."""
        return mask.is_causal and self.lengths is None

    def _attend_one(self, forward: Forward) -> torch.Tensor:
        slots, mask = self.slots, forward.mask
        seen = None if self._all_visible(mask) else mask.visible(slots.positions, forward.positions)
        probabilities = attention_probabilities(
            forward.query, slots.keys, forward.scoring, visible=seen
        )
        self._observe(probabilities, forward.positions)
        return weigh_values(probabilities, slots.values)

    def _attend_many(self, forward: Forward) -> torch.Tensor:
        query, scoring = forward.query, forward.scoring
        keys, values = self.slots.keys, self.slots.values
        first = query.shape[2] == keys.shape[2]
        if first and scoring.is_plain and self._all_visible(forward.mask):
            return causal_attention(query, keys, values, scaling=scoring.scaling)
        visible, causal = self._visible(forward), forward.mask.is_causal
        return blockwise_attention(query, keys, values, scoring, visible, causal=causal)

    def _visible(self, forward: Forward) -> Callable[[int, int], torch.Tensor]:
        """The mask of a range of the new queries; one for all heads where they see the same."""
        mask, positions, held = forward.mask, forward.positions, self.slots.positions
        if self._all_visible(mask):
            # Whatever is held is older than the queries: only the new tokens' order matters.
            past = positions.new_zeros(1, held.shape[2] - positions.shape[1])
            held = torch.cat([past, positions], dim=1)[:, None]
        return lambda start, end: mask.visible(held, positions[:, start:end])

    def _arrive(self, forward: Forward) -> None:
        """Note what is wanted of the new tokens, before attention; a full cache wants nothing."""

    def _observe(self, probabilities: torch.Tensor, positions: torch.Tensor) -> None:
        """Learn from the attention `[B, G, H/G, Q, T]` of new queries; a full cache does not."""

    def _settle(self, forward: Forward) -> None:
        """Act after attention; a full cache does not."""

    # Storing ----------------------------------------------------------------------------------

    def _insert(self, keys: torch.Tensor, values: torch.Tensor) -> slice | torch.Tensor:
        """Find slots for new tokens and write them there."""
        total = len(self.slots) + keys.shape[2]
        start = self.slots.append(keys, values, headroom=headroom(total))
        return slice(start, total)

    def reset(self) -> None:
        """Forget everything."""
        self.slots = self.slots.emptied()
        self.seen, self.lengths, self.has_evicted = 0, None, False
        self.awaits_attention = False

    def crop(self, tokens_to_remove: int) -> None:
        """Take the newest tokens back.

        Args:
            tokens_to_remove: How many, as a negative number.

        Raises:
            ConfigError: When a token was evicted since: it cannot come back.
        """
        if tokens_to_remove > 0:
            raise ConfigError(
                f"crop({tokens_to_remove}) asks for a length: pass the number of newest tokens to "
                "remove as a negative number"
            )
        if tokens_to_remove == 0 or self.slots.is_empty:
            return
        if self.has_evicted:
            raise ConfigError(
                "this cache has evicted or repacked tokens, so none can be taken back: fork() it "
                "before the tokens you may not want, or use method full"
            )
        self._drop_newest(min(-tokens_to_remove, self.seen))

    def _drop_newest(self, count: int) -> None:
        if count == self.seen:
            self.reset()
            return
        self.slots.thaw()
        self.seen -= count
        if self.lengths is not None:
            self.lengths = self.lengths - (self.slots.positions[:, 0, -count:] >= 0).sum(-1)
        self.slots.truncate(len(self.slots) - count)

    # The batch --------------------------------------------------------------------------------

    def _change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if not self.slots.is_empty:
            self.slots.map(change)
            self.lengths = None if self.lengths is None else change(self.lengths)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take row `beam_idx[i]` as row i, `[B]`."""
        self._change_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some rows, `[K]` indices or a `[B]` mask."""
        self._change_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def offload(self) -> None:
        """Refuse: a layer attends to what it holds, where it holds it."""
        raise ConfigError("a kvfold cache cannot be offloaded layer by layer: give it a budget")

    def prefetch(self) -> None:
        """Nothing is offloaded."""
