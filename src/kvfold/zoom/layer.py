"""A cache layer at two resolutions: exact tokens, and spans that are expanded where it matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from kvfold.cache.forward import Forward
from kvfold.cache.layer import CacheLayer
from kvfold.cache.slots import Slots
from kvfold.errors import ConfigError, UnsupportedModelError
from kvfold.zoom.attention import Exact, zoom_attention
from kvfold.zoom.gates import Gates
from kvfold.zoom.notes import TextNotes
from kvfold.zoom.pool import Fetched
from kvfold.zoom.routing import Router
from kvfold.zoom.sketch_router import SketchRouter
from kvfold.zoom.slow import MakeSlow
from kvfold.zoom.spans import Fold, Spans
from kvfold.zoom.summary_router import SummaryRouter

Routing = Literal["sketch", "summary"]
"""By what spans are ranked: the codes of their tokens' keys, or their mean keys."""
SURPRISAL = "surprisal"
"""Field of the first layer: surprisal of each exact token in nats, 0 where it is not known."""

_OWN = ("settled", "moment")
_ROOM = "room"
"""Name of what was decided at the last fold: spans to expand, and slots that are allocated."""
_QUERIES = 8
"""Queries of a later prompt that expand their spans at once."""
_TELLING = 64
"""Queries of a prompt that the sketch's directions can be found by."""
_SHARING = 64
"""Queries whose scores are in memory at once, where the tokens of all spans are."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """What all layers of one cache share."""

    share: float
    """Of a full cache's bytes, what may stand on the fast tier."""
    routing: Routing
    """What ranks spans."""
    directions: int
    """Of the routing sketch."""
    gates: Gates | None
    """Trained ones for routing by summaries, and for the ranks of factors, if there are any."""
    step: int
    """New tokens that are divided at a time, at least."""
    dtype: torch.dtype | None
    """In which spans are held, on both tiers; in the model's own without it."""
    zoom: bool
    """Whether any span is ever expanded."""
    make_slow: MakeSlow
    """Makes the slow tier of a layer."""

    def __deepcopy__(self, memo: dict[int, object]) -> Resolution:
        """Itself: nothing of it changes, and gates are large."""
        return self


class ZoomLayer(CacheLayer):
    """Keeps every token: some exactly, the others in spans.

    A cache folds tokens into spans at the end of a forward, the same in all layers; which spans are
    expanded, each kv head decides at each query.
    """

    def __init__(self, resolution: Resolution, index: int = 0) -> None:
        """Start empty.

        Args:
            resolution: What all layers of the cache share.
            index: Which of them this is, from 0.
        """
        super().__init__(Slots(shared=True, common=(SURPRISAL,) if index == 0 else ()))
        self.resolution, self._index = resolution, index
        self.notes: TextNotes | None = None
        """Of what is read, where one asks; the first layer's speaks for all."""
        self._forget_spans()

    @property
    def is_croppable(self) -> bool:
        """Not for good: sooner or later tokens are folded."""
        return False

    @property
    def queries_wanted(self) -> int:
        """So many tell in which directions queries are long; all that there are, tell it better."""
        return _TELLING if self.spans.router.needs_queries else 0

    @property
    def newest(self) -> slice | torch.Tensor:
        """Slots of the tokens of the last forward."""
        return self._inserted

    def _forget_spans(self) -> None:
        how = self.resolution
        slow = how.make_slow(self._index, torch.device("cpu"))
        self.spans = Spans(self._make_router(), slow, how.dtype)
        self.settled: torch.Tensor | None = None
        """Logical position before which tokens are divided for good, `[B]`; None for none."""
        self.expanded = 0
        """Spans that a kv head expands for a query."""
        self.peaks = [0, 0]
        """Largest fast bytes so far: before there were spans, and since."""
        self.peak_brought = 0
        """Largest bytes that queries of one forward expanded beside them, while it was this layer's
        turn."""
        self.is_whole = True
        """Whether no fold was interrupted; the first layer's speaks for all."""
        self.is_ragged = False
        """Whether some rows keep fewer exact tokens than others, so that slots are empty."""
        self.moment: torch.Tensor | None = None
        """Sum of the outer products of queries until each row has spans, `[B, G, D, D]`; those that
        were taken back stay in it."""

    def _make_router(self) -> Router:
        how = self.resolution
        if how.routing == "sketch":
            return SketchRouter(how.directions)
        return SummaryRouter(how.gates, self._index)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._forget_spans()

    def _place_spans(self, device: torch.device) -> None:
        """Choose the slow tier by where the layer's tokens are, before there is any span."""
        if device.type != "cpu":
            self.spans.slow = self.resolution.make_slow(self._index, device)

    def _insert(self, keys: torch.Tensor, values: torch.Tensor) -> slice | torch.Tensor:
        if self.slots.is_empty:
            self._place_spans(keys.device)
        return super()._insert(keys, values)

    def prepare(self, fold: Fold) -> None:
        """Make sure that a fold will succeed, before anything is changed.

        Args:
            fold: Which tokens.

        Raises:
            ArtifactError: When the slow tier has no room for them.
            ConfigError: When numbers cannot be held as spans are.
        """
        if fold.lengths.shape[1] == 0:
            return
        tokens = fold.positions[:, None, :, None] >= 0
        keys, values = (tensor.where(tokens, 0) for tensor in self._of(fold))
        most = torch.finfo(self.spans.dtype or keys.dtype).max
        held = [keys, values] if self.moment is None else [keys, values, self.moment]
        bounds = [most, most, torch.finfo(torch.float32).max]
        largest = torch.stack([tensor.abs().amax().float() for tensor in held])
        if not bool((largest <= largest.new_tensor(bounds[: len(held)])).all()):
            raise ConfigError(
                f"keys, values or queries of layer {self._index} are not finite or above {most:g}, "
                "the most that spans hold: give sekv slow='exact', or look for NaN in the weights"
            )
        self.spans.reserve(fold, self.slots.keys)

    def _of(self, fold: Fold) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens of new spans, `[B, G, N, D]` each."""
        where = fold.tokens[:, None, :, None]
        keys, values = (
            tensor.gather(2, where.expand(-1, tensor.shape[1], -1, tensor.shape[3]))
            for tensor in (self.slots.keys, self.slots.values)
        )
        return keys, values

    def fold(self, fold: Fold, settled: torch.Tensor, room: int) -> None:
        """Turn exact tokens into spans, which was prepared.

        Args:
            fold: Which.
            settled: Logical position before which tokens are divided for good, `[B]`.
            room: Tokens that will come before the next fold.
        """
        self.note_peak()
        self.settled = settled.to(self.slots.positions.device, copy=True)
        if fold.lengths.shape[1] > 0:
            self.spans.add(*self._of(fold), fold, self.moment)
            self.slots.keep(fold.stay, fold.held)
            self.slots.reserve(len(self.slots) + room)
            self.has_evicted = True
            if bool(self.spans.in_rows.all()):
                self.moment = None
            self.is_ragged = not bool(fold.held.all())
        self._share_out(self._affordable())

    def _affordable(self) -> int:
        """Spans that a kv head may hold within the budget; one at least, and no more than are."""
        if self.spans.is_empty or not self.resolution.zoom:
            return 0
        rows, full = len(self.slots.keys), self.bytes_full
        seen = rows * self.seen if self.lengths is None else int(self.lengths.sum())
        allowed = int(self.resolution.share * full * seen / (rows * self.seen))
        left = allowed - self.slots.nbytes - self.spans.bytes_fast
        return max(min(left // self.spans.bytes_expanded, len(self.spans)), 1)

    def _share_out(self, places: int) -> None:
        """Let spans that come ahead take some of the places, unless all spans have one."""
        share = self.spans.share_ahead
        is_scarce = places < len(self.spans)
        self.spans.ahead = int(places * share / (1 + share)) if is_scarce else 0
        self.expanded = places - self.spans.ahead

    @property
    def _places(self) -> int:
        """Spans of a kv head that may stand on the fast tier at once."""
        return self.expanded + self.spans.ahead

    # What is held -----------------------------------------------------------------------------

    @property
    def bytes_fast(self) -> int:
        """Exact tokens, what spans have on the fast tier, and the spans that a query expands."""
        expanded = self._places * self.spans.bytes_expanded
        return super().bytes_fast + self.spans.bytes_fast + expanded

    @property
    def bytes_index(self) -> int:
        """Positions, surprisal and what spans have on the fast tier, expanded tokens left out."""
        return super().bytes_index - self._places * self.spans.bytes_expanded

    @property
    def bytes_slow(self) -> int:
        """The tokens of spans, and what only spans that are to come need."""
        return self.spans.bytes_slow + (0 if self.moment is None else self.moment.nbytes)

    def note_peak(self, queries: int = 1) -> None:
        """Note the fast bytes of now, the most since the last fold.

        Args:
            queries: Of one forward; what several expand at once is held beside all else.
        """
        stage = 0 if self.spans.is_empty else 1
        self.peaks[stage] = max(self.peaks[stage], self.bytes_fast)
        if queries > 1:
            brought = min(self._brought(queries), len(self.spans)) * self.spans.bytes_expanded
            self.peak_brought = max(self.peak_brought, brought)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name."""
        yield from super().state()
        for name in _OWN:
            if (tensor := getattr(self, name)) is not None:
                yield name, tensor
        if not self.spans.is_empty:
            yield _ROOM, torch.tensor([self.expanded, self.slots.capacity])
        for name, tensor in self.spans.state():
            yield f"spans.{name}", tensor

    def load(self, tensors: dict[str, torch.Tensor], seen: int, *, has_evicted: bool) -> None:
        """Take back what `state` gave."""
        prefix = "spans."
        spans = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
        for name in _OWN:
            setattr(self, name, own.pop(name, None))
        room = own.pop(_ROOM, None)
        super().load(own, seen, has_evicted=has_evicted)
        if spans:
            self._place_spans(spans["means"].device)
        self.spans.load(spans)
        self.is_ragged = not self.spans.is_empty and bool((self.slots.positions < 0).any())
        if room is not None:
            self.expanded, capacity = room.tolist()
            self.slots.reserve(capacity)

    # Attention --------------------------------------------------------------------------------

    def _arrive(self, forward: Forward) -> None:
        """Refuse what could not be answered once there are spans."""
        if not forward.mask.is_causal:
            raise UnsupportedModelError(
                "sekv knows plain causal attention alone, and this model's mask is another: use "
                "an eviction method"
            )

    def _attend_one(self, forward: Forward) -> torch.Tensor:
        return super()._attend_one(forward) if self.spans.is_empty else self._zoom(forward)

    def _attend_many(self, forward: Forward) -> torch.Tensor:
        return super()._attend_many(forward) if self.spans.is_empty else self._zoom(forward)

    def _brought(self, queries: int) -> int:
        """Spans that a kv head brings for queries that expand at once: all for a long prompt."""
        if queries >= _SHARING and self.expanded > 0:
            return len(self.spans)
        return min(queries, _QUERIES) * self.expanded

    def _zoom(self, forward: Forward) -> torch.Tensor:
        count, step, everything = forward.query.shape[2], _QUERIES, None
        if count > 1:
            self.note_peak(count)
            if self._brought(count) >= len(self.spans):
                # Nothing is brought twice, and products are large.
                step, everything = _SHARING, self.spans.everything()
        blocks = [
            self._zoom_block(forward, start, min(start + step, count), everything)
            for start in range(0, count, step)
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)

    def _zoom_block(
        self, forward: Forward, start: int, end: int, everything: Fetched | None
    ) -> torch.Tensor:
        slots, positions = self.slots, forward.positions[:, start:end]
        is_newest = forward.query.shape[2] == 1 and self._all_visible(forward.mask)
        sees_all = is_newest and not self.is_ragged
        visible = None if sees_all else forward.mask.visible(slots.positions, positions)
        exact = Exact(slots.keys, slots.values, visible)
        query = forward.query[:, :, start:end]
        return zoom_attention(query, exact, self.spans, self.expanded, forward.scoring, everything)

    def _settle(self, forward: Forward) -> None:
        """Note in which directions queries are long, until each row has spans."""
        has_enough = self.moment is None and not self.spans.is_empty
        if has_enough or not self.spans.router.needs_queries:
            return
        query = (forward.query.detach() * forward.scoring.scaling).float()
        if self.lengths is not None:
            is_token = forward.positions[:, -query.shape[2] :] >= 0
            query = query * is_token[:, None, :, None]
        query = query.unflatten(1, (self.slots.keys.shape[1], -1)).flatten(2, 3)
        moment = query.transpose(-1, -2) @ query
        self.moment = moment if self.moment is None else self.moment + moment

    # The batch --------------------------------------------------------------------------------

    def _change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.is_initialized:
            self.note_peak()
        super()._change_rows(change)
        self.spans.map(change)
        self.settled = None if self.settled is None else change(self.settled)
        self.moment = None if self.moment is None else change(self.moment)
