"""The spans of one layer at two resolutions.

SeKV (arXiv 2606.31145). On the fast tier a span is one mean value, weighted by surprisal, and the
codes of its tokens' keys; on the slow tier stand the keys and values of its tokens. The tokens of
all spans of a row stand one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch

from kvfold.zoom.growing import Growing
from kvfold.zoom.pool import Fetched, Pool
from kvfold.zoom.sketch import Sketch
from kvfold.zoom.tiers import RawTier, Wanted

_SKETCH = ("center", "look", "write")


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
        self.slow = RawTier(longest)
        """Keys and values of the tokens of all spans."""
        self.sketch: Sketch | None = None
        self._codes = Growing({"codes": 3})
        self._fast = Growing({"means": 2, "starts": 1, "ends": 1})
        self.pool: Pool | None = None
        """What the last generated token expanded."""
        self.moved = 0
        """Tokens of a kv head that were brought to the fast tier so far."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no span yet."""
        return self.sketch is None

    @property
    def codes(self) -> torch.Tensor:
        """Of every token of a span, `[B, G, R / 2, T]`."""
        return self._codes["codes"]

    @property
    def means(self) -> torch.Tensor:
        """Mean value of each span, `[B, G, S, D]`."""
        return self._fast["means"]

    @property
    def starts(self) -> torch.Tensor:
        """First token of each span among those of its row, `[B, S]`."""
        return self._fast["starts"]

    @property
    def ends(self) -> torch.Tensor:
        """After the last token of each span, `[B, S]`."""
        return self._fast["ends"]

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each span, `[B, S]`; 0 where a row has fewer spans."""
        return self.ends - self.starts

    @property
    def in_rows(self) -> torch.Tensor:
        """Whether a row has any span, `[B]`."""
        return (self.lengths > 0).any(1)

    def __len__(self) -> int:
        """Spans of the row that has most."""
        return len(self._fast)

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
        ends = fold.lengths.cumsum(-1) + len(self.slow)
        self._codes.append({"codes": self.sketch.encode(keys, fold.positions >= 0)})
        self._fast.append(
            {"means": _means(values, fold), "starts": ends - fold.lengths, "ends": ends}
        )
        self.slow.add(keys, values, fold.positions)

    def estimate(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Estimated products of scaled queries with the tokens of all spans; see `Sketch.scores`.

        Args:
            query: `[B, G, Q, D]`.
        """
        assert self.sketch is not None
        return self.sketch.scores(query, self.codes)

    # Expanding --------------------------------------------------------------------------------

    def fetch(self, rows: torch.Tensor, heads: torch.Tensor, spans: torch.Tensor) -> Fetched:
        """Bring the tokens of some spans to the fast tier.

        Args:
            rows: Row of each, `[N]`.
            heads: Kv head of each, `[N]`.
            spans: Their numbers, `[N]`.

        Returns:
            Tokens `[N, L, 2D]`.
        """
        starts = self.starts[rows, spans]
        lengths = self.ends[rows, spans] - starts
        steps = torch.arange(self.longest, device=lengths.device)
        is_token = steps < lengths[:, None]
        self.moved += int(lengths.sum())
        return Fetched(self.slow.fetch(Wanted(rows, heads, spans, starts, lengths)), is_token)

    def _fetch_all(self, chosen: torch.Tensor) -> Fetched:
        """The tokens of spans `[B, G, *]`, `[B, G, *, L, 2D]`."""
        rows, heads = chosen.shape[:2]
        row = torch.arange(rows, device=chosen.device).view(-1, 1, *[1] * (chosen.ndim - 2))
        head = torch.arange(heads, device=chosen.device).view(1, -1, *[1] * (chosen.ndim - 2))
        numbers = [each.expand_as(chosen).flatten() for each in (row, head, chosen)]
        found = self.fetch(*numbers)
        return Fetched(
            found.tokens.unflatten(0, chosen.shape), found.is_token.unflatten(0, chosen.shape)
        )

    def expand(self, chosen: torch.Tensor) -> Fetched:
        """Bring the tokens of the spans that each query chose.

        Those of a single query stay until the next one chooses others.

        Args:
            chosen: Spans, different ones for each query, `[B, G, Q, E]`.

        Returns:
            Tokens in any order of a query's spans, `[B, G, Q, E, L, 2D]`.
        """
        if chosen.shape[2] > 1:
            return self._fetch_all(chosen)
        only = chosen[:, :, 0]
        if self.pool is None or self.pool.places != only.shape or self.pool.is_frozen:
            self.pool = Pool(only.clone(), self._fetch_all(only))
        else:
            self.pool.bring(only, self.fetch)
        held = self.pool.held
        return Fetched(held.tokens.unsqueeze(2), held.is_token.unsqueeze(2))

    # What is held -----------------------------------------------------------------------------

    @property
    def bytes_fast(self) -> int:
        """All tensors of the fast tier, expanded spans left out."""
        sketch = 0 if self.sketch is None else self.sketch.bytes_fast
        return sketch + self._codes.nbytes + self._fast.nbytes

    @property
    def bytes_slow(self) -> int:
        """All tensors of the slow tier."""
        return self.slow.nbytes + (0 if self.sketch is None else self.sketch.bytes_slow)

    @property
    def bytes_expanded(self) -> int:
        """What one expanded span of every row and kv head takes on the fast tier."""
        if self.is_empty:
            return 0
        rows, heads, width = self.means.shape[0], self.means.shape[1], self.slow.width
        token = width * self.means.element_size()
        # Of each token whether it is one, of each span which it is.
        return rows * heads * (self.longest * (token + 1) + self.ends.element_size())

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to every tensor."""
        if self.sketch is not None:
            self.pool = None
            for held in (self.slow, self._codes, self._fast):
                held.map(change)
            self.sketch = Sketch(**{name: change(getattr(self.sketch, name)) for name in _SKETCH})

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, expanded spans left out; none before the first span."""
        if self.sketch is not None:
            for held in (self.slow, self._codes, self._fast):
                yield from held.state()
            for name in _SKETCH:
                yield name, getattr(self.sketch, name)

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        if tensors:
            for held in (self.slow, self._codes, self._fast):
                held.load(tensors)
            self.sketch = Sketch(**{name: tensors[name] for name in _SKETCH})


def _means(values: torch.Tensor, fold: Fold) -> torch.Tensor:
    """Mean value of each new span, weighted, `[B, G, S, D]`."""
    batch, groups, _, width = values.shape
    weighted = values.float() * fold.weights[:, None, :, None]
    sums = weighted.new_zeros(batch, groups, fold.lengths.shape[1] + 1, width)
    where = fold.span_of[:, None, :, None].expand_as(weighted)
    return sums.scatter_add_(2, where, weighted)[:, :, :-1].to(values.dtype)
