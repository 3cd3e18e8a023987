"""The spans of one layer at two resolutions.

SeKV (arXiv 2606.31145). On the fast tier a span is one mean value, weighted by surprisal, and the
codes of its tokens' keys; on the slow tier stand the keys and values of its tokens. The tokens of
all spans of a row stand one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch

from kvfold.cache.slots import Slots, headroom
from kvfold.zoom.sketch import Sketch

_SKETCH = ("center", "read", "write")
_FAST = ("codes", "means", "starts", "lengths")


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Which exact tokens become spans, the same in all layers of a cache."""

    tokens: torch.Tensor
    """Slots of the tokens of new spans, in order, `[B, N]`; any slot where a row has fewer."""
    positions: torch.Tensor
    """Their logical positions, `[B, N]`; negative where a row has fewer."""
    span_of: torch.Tensor
    """The new span of each, from 0, `[B, N]`; S where a row has fewer."""
    weights: torch.Tensor
    """Share of each in its span's summary, `[B, N]`."""
    lengths: torch.Tensor
    """Tokens of each new span, `[B, S]`; 0 where a row has fewer."""
    stay: torch.Tensor
    """Slots that stay exact, in order, `[B, 1, K]`."""
    held: torch.Tensor
    """False where a row has fewer, `[B, 1, K]`."""

    def to(self, device: torch.device) -> Fold:
        """The same on another device."""
        return Fold(**{each.name: getattr(self, each.name).to(device) for each in fields(self)})


class Spans:
    """Grows by folds; empty at first."""

    def __init__(self, directions: int, longest: int, dtype: torch.dtype | None) -> None:
        """Start without spans.

        Args:
            directions: R of the sketch.
            longest: L, tokens of the longest span.
            dtype: In which spans are held, on both tiers; as they come without it.
        """
        self.directions, self.longest, self.dtype = directions, longest, dtype
        self.slow = Slots(shared=True)
        """Keys and values of the tokens of all spans."""
        self.sketch: Sketch | None = None
        self._fast: dict[str, torch.Tensor] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is no span yet."""
        return self.sketch is None

    @property
    def codes(self) -> torch.Tensor:
        """Of every token of a span, `[B, G, T, R / 2]`."""
        return self._fast["codes"]

    @property
    def means(self) -> torch.Tensor:
        """Mean value of each span, `[B, G, S, D]`."""
        return self._fast["means"]

    @property
    def starts(self) -> torch.Tensor:
        """First token of each span among those of its row, `[B, S]`."""
        return self._fast["starts"]

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each span, `[B, S]`; 0 where a row has fewer spans."""
        return self._fast["lengths"]

    @property
    def in_rows(self) -> torch.Tensor:
        """Whether a row has any span, `[B]`."""
        return (self.lengths > 0).any(1)

    def add(
        self, keys: torch.Tensor, values: torch.Tensor, fold: Fold, moment: torch.Tensor | None
    ) -> None:
        """Append new spans.

        Args:
            keys: Of the tokens of new spans, `[B, G, N, D]`, rotated.
            values: `[B, G, N, D]`.
            fold: Which they are.
            moment: Of the queries so far, `[B, G, D, D]`, as long as a row has no span; see
                `Sketch.fit`.
        """
        keys, values = (tensor.to(self.dtype or tensor.dtype) for tensor in (keys, values))
        if moment is not None:
            fitted = Sketch.fit(keys, fold.positions >= 0, moment, self.directions)
            known = self.sketch
            self.sketch = fitted if known is None else known.where(self.in_rows, fitted)
        assert self.sketch is not None
        self.slow.thaw()
        start = self.slow.append(keys, values, headroom=headroom(len(self.slow)))
        self.slow.place(slice(start, len(self.slow)), fold.positions)
        before = fold.lengths.cumsum(-1) - fold.lengths
        self._append("codes", self.sketch.encode(keys, fold.positions >= 0), 2)
        self._append("means", _means(values, fold), 2)
        self._append("starts", (before + start).int(), 1)
        self._append("lengths", fold.lengths.int(), 1)

    def _append(self, name: str, new: torch.Tensor, dim: int) -> None:
        held = self._fast.get(name)
        self._fast[name] = new if held is None else torch.cat([held, new], dim=dim)

    def estimate(self, query: torch.Tensor) -> torch.Tensor:
        """Scores of scaled queries `[B, G, Q, D]` with the tokens of all spans, `[B, G, Q, T]`."""
        assert self.sketch is not None
        return self.sketch.scores(query, self.codes)

    def expand(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Bring the tokens of some spans to the fast tier.

        Args:
            chosen: Spans, `[B, G, E]`.

        Returns:
            Keys and values `[B, G, E * L, D]`, and false where a span is shorter, `[B, G, E * L]`.
        """
        starts, lengths = (
            numbers[:, None].expand(-1, chosen.shape[1], -1).gather(2, chosen).long()
            for numbers in (self.starts, self.lengths)
        )
        steps = torch.arange(self.longest, device=chosen.device)
        is_token = steps < lengths.unsqueeze(-1)
        where = (starts.unsqueeze(-1) + steps).flatten(2).clamp_max(len(self.slow) - 1)
        keys, values = (
            tensor.gather(2, where.unsqueeze(-1).expand(-1, -1, -1, tensor.shape[-1]))
            for tensor in (self.slow.keys, self.slow.values)
        )
        return keys, values, is_token.flatten(2)

    @property
    def bytes_fast(self) -> int:
        """All tensors of the fast tier, expanded spans left out."""
        sketch = 0 if self.sketch is None else self.sketch.bytes_fast
        return sketch + sum(tensor.nbytes for tensor in self._fast.values())

    @property
    def bytes_slow(self) -> int:
        """All tensors of the slow tier."""
        return self.slow.nbytes + (0 if self.sketch is None else self.sketch.bytes_slow)

    @property
    def bytes_expanded(self) -> int:
        """What one expanded span of every row and kv head takes on the fast tier."""
        return 0 if self.is_empty else self.longest * self.slow.token_bytes

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to every tensor."""
        if self.sketch is not None:
            self.slow.map(change)
            tensors = {name: change(tensor) for name, tensor in self._shared_state().items()}
            self._load_shared(tensors)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name; none before the first span."""
        if self.sketch is not None:
            yield from self.slow.state()
            yield from self._shared_state().items()

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        if tensors:
            own = {name: tensors.pop(name) for name in (*_SKETCH, *_FAST)}
            self.slow.load(tensors)
            self._load_shared(own)

    def _shared_state(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self.sketch, name) for name in _SKETCH} | self._fast

    def _load_shared(self, tensors: dict[str, torch.Tensor]) -> None:
        self.sketch = Sketch(**{name: tensors[name] for name in _SKETCH})
        self._fast = {name: tensors[name] for name in _FAST}


def _means(values: torch.Tensor, fold: Fold) -> torch.Tensor:
    """Mean value of each new span, weighted, `[B, G, S, D]`."""
    batch, groups, _, width = values.shape
    weighted = values.float() * fold.weights[:, None, :, None]
    sums = weighted.new_zeros(batch, groups, fold.lengths.shape[1] + 1, width)
    where = fold.span_of[:, None, :, None].expand_as(weighted)
    return sums.scatter_add_(2, where, weighted)[:, :, :-1].to(values.dtype)
