"""When tokens are folded into spans: at the end of a forward, in all layers together."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from kvfold.cache import CacheLayer, Outcome
from kvfold.errors import ArtifactError
from kvfold.models import lm_head
from kvfold.zoom.fold import Segmenting, plan_fold
from kvfold.zoom.layer import SURPRISAL, ZoomLayer
from kvfold.zoom.report import ZoomReport, zoom_report
from kvfold.zoom.surprisal import Surprisal

WINDOW = 256
"""Newest tokens that stay exact, at most."""
LEAST_WINDOW = 8
"""And at least, however small the budget."""
FIRST = 32
"""Tokens of a row that are divided first, at least: directions are found among them."""
_LEAST_SINKS = 4
"""First tokens that stay exact in any case, where so many are asked for."""
_SINK_PART = 4
"""More of them take at most this part of a budget."""
_WINDOW_PART = 16
"""The window takes this part of a budget."""
_ANCHOR_PART = 32
"""And the anchors with the runs beside them that are too short for a span, this."""

_known: weakref.WeakKeyDictionary[PreTrainedModel, Surprisal] = weakref.WeakKeyDictionary()


def surprisal_of(model: PreTrainedModel) -> Surprisal:
    """What gives a model's surprisal, found once for each model and head."""
    known = _known.get(model)
    if known is None or known.head is not lm_head(model):
        known = _known[model] = Surprisal(model)
    return known


class Folding:
    """Keeps the newest tokens exact and folds what is older, as `sekv` does."""

    def __init__(self, model: PreTrainedModel, segmenting: Segmenting) -> None:
        """Prepare for a model.

        Args:
            model: Whose head tells how surprising a token is; no reference keeps it alive.
            segmenting: How a text is divided.
        """
        self._model = weakref.ref(model)
        self._how = segmenting
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._noted: int | None = None
        """Tokens seen when surprisal was noted; a fold that failed is tried again without it."""

    def report(self, layers: Sequence[CacheLayer]) -> ZoomReport | None:
        """What the layers hold, and what it took to fold them."""
        return zoom_report(layers, dict(self._seconds))

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Count how long a part takes; on CUDA what it takes to ask for it."""
        begin = time.perf_counter()
        yield
        self._seconds[part] += time.perf_counter() - begin

    def before_forward(self, layers: list[CacheLayer], count: int) -> None:
        """Make what was stored under `torch.inference_mode` writable."""
        self._noted = None
        for layer in layers:
            layer.slots.thaw()

    def after_forward(self, layers: list[CacheLayer], outcome: Outcome | None) -> None:
        """Note the surprisal of new tokens, and fold those that left the window."""
        zoom = [layer for layer in layers if isinstance(layer, ZoomLayer)]
        if not zoom or zoom[0].slots.is_empty:
            return
        first = zoom[0]
        if not first.is_whole:
            raise ArtifactError(
                "making spans was interrupted, and the layers of this cache no longer hold the "
                "same tokens: make a new cache and read the text again"
            )
        new = first.newest
        if isinstance(new, slice) and new.stop - new.start > 1 and self._noted != first.seen:
            with self._timed("surprisal"):
                self._note_surprisal(first, new, outcome)
            self._noted = first.seen
        lengths, settled = _lengths(first), _settled(first)
        share, step = first.resolution.share, first.resolution.step
        worth, window = (share * lengths).long(), _window(share, lengths)
        until = lengths - window
        least = torch.where(settled == 0, max(step, FIRST) + self._how.sinks, step)
        is_due = until - settled >= least
        if bool(is_due.any()):
            exact = first.slots.counts - (lengths - settled)
            most = (worth // _ANCHOR_PART - exact).clamp_min(0)
            sinks = (worth // _SINK_PART).clamp_min(_LEAST_SINKS).clamp_max(self._how.sinks)
            # The window grows with the text: now and then more tokens come before the next fold.
            growth = _window(share, lengths + 2 * step) - window
            until = until.where(is_due, settled)
            self._fold(zoom, settled, until, most, sinks, step + int(growth.max()))

    def _note_surprisal(self, first: ZoomLayer, new: slice, outcome: Outcome | None) -> None:
        """Of a prompt; a generated token is one that the model itself found likely: 0.

        The first token of a chunk or turn has 0 as well: what predicted it is no longer there. So
        have all tokens of a prompt of which no ids or no hidden states are known, as when it comes
        as embeddings: it is divided evenly.
        """
        model, slots = self._model(), first.slots
        if model is None or outcome is None or outcome.input_ids is None:
            return
        rows = len(outcome.hidden)
        tokens = (slots.positions[:, 0, new] >= 0).expand(rows, -1)
        ids = outcome.input_ids.expand(rows, -1)
        if SURPRISAL not in outcome.known:
            nats = surprisal_of(model)(outcome.hidden, ids, tokens=tokens)
            outcome.known[SURPRISAL] = nats
        nats = outcome.known[SURPRISAL]
        slots.note(new, SURPRISAL, nats[:, None].to(slots.positions.device))
        if first.notes is not None:
            first.notes.note_surprisal(slots.positions[:, 0, new].expand(rows, -1), nats)

    def _fold(
        self,
        layers: Sequence[ZoomLayer],
        settled: torch.Tensor,
        until: torch.Tensor,
        most: torch.Tensor,
        sinks: torch.Tensor,
        room: int,
    ) -> None:
        first = layers[0].slots
        surprisal = first.field(SURPRISAL)[:, 0]
        with self._timed("segmentation"):
            fold = plan_fold(first, surprisal, settled, until, self._how, most, sinks)
        if (notes := layers[0].notes) is not None:
            notes.note_anchors(fold.anchors)
        with self._timed("spans"):
            folds = [fold.to(layer.slots.positions.device) for layer in layers]
            for layer, its_fold in zip(layers, folds, strict=True):
                layer.prepare(its_fold)
            layers[0].is_whole = False
            for layer, its_fold in zip(layers, folds, strict=True):
                layer.fold(its_fold, until, room)
            layers[0].is_whole = True


def _window(share: float, lengths: torch.Tensor) -> torch.Tensor:
    """Newest tokens that stay exact in rows of so many, `[B]`."""
    return ((share * lengths).long() // _WINDOW_PART).clamp(LEAST_WINDOW, WINDOW)


def _lengths(layer: ZoomLayer) -> torch.Tensor:
    """Tokens seen by each row, `[B]`."""
    lengths, positions = layer.row_lengths, layer.slots.positions
    if isinstance(lengths, torch.Tensor):
        return lengths
    return torch.full(positions.shape[:1], lengths, device=positions.device)


def _settled(layer: ZoomLayer) -> torch.Tensor:
    positions = layer.slots.positions
    return (
        torch.zeros_like(positions[:, 0, 0], dtype=torch.long)
        if layer.settled is None
        else layer.settled
    )
