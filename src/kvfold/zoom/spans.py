"""The spans of one layer at two resolutions.

SeKV (arXiv 2606.31145). On the fast tier a span is one mean value, weighted by surprisal, and what
its router holds of its keys; the keys and values of its tokens are on the slow tier. The tokens of
all spans of a row stand one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch

from kvfold.attention import Scoring
from kvfold.zoom.ahead import Ahead
from kvfold.zoom.growing import Growing
from kvfold.zoom.notes import Tally
from kvfold.zoom.pinned import PinnedTier
from kvfold.zoom.pool import Fetched, Pool
from kvfold.zoom.routing import NewSpans, Ranges, Routed, Router
from kvfold.zoom.tiers import Folded, SlowTier, Wanted


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
    anchors: torch.Tensor
    """Logical positions of the anchors among the divided tokens, `[B, *]`; negative for others."""

    def to(self, device: torch.device) -> Fold:
        """The same on another device."""
        return Fold(**{each.name: getattr(self, each.name).to(device) for each in fields(self)})


class Spans:
    """Grows by folds; empty at first."""

    def __init__(self, router: Router, slow: SlowTier, dtype: torch.dtype | None) -> None:
        """Start without spans.

        Args:
            router: Ranks them.
            slow: Holds their tokens.
            dtype: In which spans are held, on both tiers; as they come without it.
        """
        self.router, self.slow, self.dtype = router, slow, dtype
        self._fast = Growing({"means": 2, "starts": 1, "ends": 1})
        self.pool: Pool | None = None
        """What the last generated token expanded."""
        self.ahead = 0
        """Spans that a kv head brings before they are asked for."""
        self._ahead: Ahead | None = None
        self._moved: torch.Tensor | int = 0
        self.tally: Tally | None = None
        """Counts what is expanded, where one asks."""

    @property
    def moved(self) -> int:
        """Tokens of a kv head that were brought to the fast tier, or read where they stand."""
        return int(self._moved)

    @property
    def is_empty(self) -> bool:
        """Whether there is no span yet."""
        return len(self._fast) == 0

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
            moment: Of the queries so far, as long as a row has no span and the router asks for it.
        """
        keys, values = (tensor.to(self.dtype or tensor.dtype) for tensor in (keys, values))
        in_rows = fold.lengths.new_zeros(len(keys)).bool() if self.is_empty else self.in_rows
        tokens = fold.positions >= 0
        mean_keys = _means(keys, fold)
        self.router.add(NewSpans(keys, tokens, mean_keys, moment, in_rows))
        ends = fold.lengths.cumsum(-1) + len(self.slow)
        self._fast.append(
            {"means": _means(values, fold), "starts": ends - fold.lengths, "ends": ends}
        )
        self.slow.add(Folded(keys, values, fold.positions, fold.lengths, mean_keys))
        self._fit_longest()

    def _fit_longest(self) -> None:
        """Give expanded spans as many places as the longest one has tokens, and no more."""
        longest = int(self.lengths.max())
        if longest != self.slow.longest:
            self.slow.longest, self.pool, self._ahead = longest, None, None

    def reserve(self, fold: Fold, keys: torch.Tensor) -> None:
        """Make sure that there is room for new spans, before anything is changed.

        Args:
            fold: Which.
            keys: Of the layer, `[B, G, *, D]`.

        Raises:
            ArtifactError: When the slow tier has none.
        """
        like = keys[:, :, :0].to(self.dtype or keys.dtype)
        self.slow.reserve(fold.tokens.shape[1], like)

    def route(self, query: torch.Tensor, scoring: Scoring) -> Routed:
        """What scaled queries `[B, G, H/G, Q, D]` make of the spans."""
        return self.router.route(query, Ranges(self.starts, self.ends), scoring)

    # Expanding --------------------------------------------------------------------------------

    def fetch(self, owners: torch.Tensor, spans: torch.Tensor) -> Fetched:
        """Bring the tokens of some spans to the fast tier.

        Args:
            owners: Row and kv head of each, `row * G + head`, `[N]`.
            spans: Their numbers, `[N]`.

        Returns:
            Tokens `[N, L, 2D]`.
        """
        wanted, is_token = self._wanted(owners, spans)
        return Fetched(self.slow.fetch(wanted), is_token)

    def _wanted(self, owners: torch.Tensor, spans: torch.Tensor) -> tuple[Wanted, torch.Tensor]:
        """What to ask of the slow tier, counted as moved, and what is a token, `[N, L]`."""
        rows = owners // self.means.shape[1]
        places = rows * self._fast.whole("starts").shape[1] + spans
        starts, ends = (
            self._fast.whole(name).view(-1).index_select(0, places) for name in ("starts", "ends")
        )
        lengths = ends - starts
        steps = torch.arange(self.slow.longest, device=lengths.device)
        self.note_moved(lengths.sum())
        return Wanted(rows, owners, spans, starts, lengths), steps < lengths[:, None]

    def note_moved(self, tokens: torch.Tensor | int) -> None:
        """Count tokens of a kv head that were brought; a tensor is not waited for."""
        self._moved = tokens + self._moved

    def _fetch_all(self, chosen: torch.Tensor) -> Fetched:
        """The tokens of spans `[B, G, *]`, `[B, G, *, L, 2D]`."""
        owners = torch.arange(chosen.shape[0] * chosen.shape[1], device=chosen.device)
        owners = owners.view(*chosen.shape[:2], *[1] * (chosen.ndim - 2))
        found = self.fetch(owners.expand_as(chosen).flatten(), chosen.flatten())
        return Fetched(
            found.tokens.unflatten(0, chosen.shape), found.is_token.unflatten(0, chosen.shape)
        )

    def expand(self, chosen: torch.Tensor) -> tuple[torch.Tensor, Fetched]:
        """Bring the tokens of the spans that each query chose.

        Those of a single query stay until the next one chooses others.

        Args:
            chosen: Spans, different ones for each query, `[B, G, Q, E]`.

        Returns:
            The same spans in another order, and their tokens, `[B, G, Q, E, L, 2D]`.
        """
        if chosen.shape[2] > 1:
            return chosen, self._fetch_all(chosen)
        only = chosen[:, :, 0]
        if self.pool is None or self.pool.places != only.shape or self.pool.is_frozen:
            self.pool = None  # two of them would not fit
            self.pool = Pool(only.clone(), self._fetch_all(only))
        else:
            self.pool.bring(only, self._served)
        spans, held = self.pool.held
        found = Fetched(held.tokens.unsqueeze(2), held.is_token.unsqueeze(2))
        return spans.unsqueeze(2), found

    @property
    def share_ahead(self) -> float:
        """Spans that come before they are asked for, as a share of those that are expanded."""
        return self.slow.ahead if isinstance(self.slow, PinnedTier) else 0.0

    def look_ahead(self, likely: torch.Tensor) -> None:
        """Begin to bring spans that the next token is likely to ask for.

        Args:
            likely: Different ones that are not expanded now, `[B, G, A]`.
        """
        if isinstance(self.slow, PinnedTier):
            owners = torch.arange(likely.shape[:2].numel(), device=likely.device)[:, None]
            spans = likely.flatten(0, 1)
            wanted, is_token = self._wanted(owners.expand_as(spans).flatten(), spans.flatten())
            self._ahead = Ahead(spans, is_token, self.slow.start(wanted))

    def _served(self, owners: torch.Tensor, spans: torch.Tensor) -> Fetched:
        """See `fetch`; what came ahead is not brought again."""
        if self._ahead is None:
            return self.fetch(owners, spans)
        return self._ahead.serve(owners, spans, self.fetch)

    def everything(self) -> Fetched:
        """Bring the tokens of all spans, `[B, G, 1, S, L, 2D]`."""
        rows, heads = self.means.shape[:2]
        spans = torch.arange(len(self), device=self.means.device)
        return self._fetch_all(spans.expand(rows, heads, 1, -1))

    # What is held -----------------------------------------------------------------------------

    @property
    def bytes_fast(self) -> int:
        """All tensors of the fast tier, expanded spans left out."""
        return self.router.bytes_fast + self._fast.nbytes

    @property
    def bytes_slow(self) -> int:
        """All tensors of the slow tier."""
        return self.router.bytes_slow + self.slow.nbytes

    @property
    def bytes_moved(self) -> int:
        """Keys and values that were brought to the fast tier so far."""
        return 0 if self.is_empty else self.moved * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """Of a token of one kv head, key and value."""
        return self.slow.width * self.means.element_size()

    @property
    def bytes_expanded(self) -> int:
        """What one expanded span of every row and kv head takes on the fast tier."""
        if self.is_empty:
            return 0
        rows, heads = self.means.shape[:2]
        # Of each token whether it is one, of each span which it is.
        return (
            rows * heads * (self.slow.longest * (self._token_bytes + 1) + self.ends.element_size())
        )

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to every tensor."""
        if not self.is_empty:
            self.pool = self._ahead = None
            for held in (self.slow, self.router, self._fast):
                held.map(change)
            if self.tally is not None:
                self.tally.map(change)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, expanded spans left out; none before the first span."""
        if not self.is_empty:
            for held in (self.slow, self.router, self._fast):
                yield from held.state()

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        if tensors:
            for held in (self.slow, self.router, self._fast):
                held.load(tensors)
            self._fit_longest()


def _means(values: torch.Tensor, fold: Fold) -> torch.Tensor:
    """Mean key or value of each new span, weighted, `[B, G, S, D]`."""
    batch, groups, _, width = values.shape
    weighted = values.float() * fold.weights[:, None, :, None]
    sums = weighted.new_zeros(batch, groups, fold.lengths.shape[1] + 1, width)
    where = fold.span_of[:, None, :, None].expand_as(weighted)
    return sums.scatter_add_(2, where, weighted)[:, :, :-1].to(values.dtype)
