"""Caches that recompute, layer by layer, the generated tokens that have drifted most.

Between two refreshes only the generated tokens flow (and, under a shifted prediction, the one that
predicts the first of them); the prompt's keys and values are frozen. In every layer a signal of
each flowing token is compared with the signal noted before: the tokens of lowest cosine are
recomputed, and the others keep their keys, values and outputs. What differs from cache to cache is
the signal, the number of tokens a layer, and the rules below. If no layer may spare any token, the
prompt is not spared either: a share of 1 is the model without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvfold.diffusion.caches.cache import CacheState
from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.decoder import Angles, Layer
from kvfold.diffusion.flow import Flow, KVStore, Outputs
from kvfold.diffusion.model import DiffusionModel, visibility
from kvfold.diffusion.parts import part

Recomputed = Literal["all", "selected"]
"""Tokens whose keys and values are recomputed: all that flow, or those selected."""
Reference = Literal["last_step", "last_update"]
"""With what a signal is compared: with that of the last step, or of the token's last update."""
Residual = Literal["change", "output"]
"""What is kept of a layer: what it adds to its input, or its output."""

STILL = 1 - 1e-5
"""Cosine from which on a token counts as not moved."""

Signal = Callable[[int, torch.Tensor], torch.Tensor]
"""From a layer's number and normed inputs `[B, F, M]` to what is compared, `[B, F, R]`."""


@dataclass(frozen=True, slots=True, eq=False)
class DriftRules:
    """How a cache of this kind goes about it."""

    ratios: list[float]
    """Share of the flowing tokens that each layer recomputes; at 1 nothing is compared."""
    signal: Signal | None
    """What is compared; the values themselves without it, which are then all new ones."""
    refresh: int
    """Steps from one recomputation of everything to the next."""
    refresh_generated: int
    """Steps from one recomputation of what flows to the next."""
    recomputed: Recomputed = "selected"
    """Whose keys and values are recomputed."""
    reference: Reference = "last_step"
    """With what a signal is compared; values always with those of the last step."""
    residual: Residual = "change"
    """What is kept of a layer."""
    factor_bytes: int = 0
    """Bytes of what the signal is computed with, besides the model's weights."""


def count_of(ratio: float, tokens: int) -> int:
    """Tokens in a share of so many, rounded down, but one at least."""
    # A share that makes a whole number of tokens may fall short of it by a rounding.
    return max(1, int(tokens * ratio + 1e-9))


def counts_of(ratios: Sequence[float], tokens: int) -> list[int]:
    """Tokens in each layer's share of so many, one at least.

    What rounding down takes from one layer is left for the next, so that the mean is what was asked
    for where a share is few tokens.
    """
    counts, left = [], 0.0
    for ratio in ratios:
        share = ratio + left / tokens
        counts.append(count_of(share, tokens))
        left = max(0.0, share * tokens - counts[-1])
    return counts


def most_drifted(signal: torch.Tensor, reference: torch.Tensor, count: int) -> torch.Tensor:
    """The tokens whose signal has turned furthest; of those that have not moved, the first.

    Args:
        signal: `[B, F, R]`.
        reference: `[B, F, R]`.
        count: Tokens wanted.

    Returns:
        Indices `[B, count]`, lowest cosine first.
    """
    cosines = torch.nn.functional.cosine_similarity(signal.float(), reference.float(), dim=-1)
    # Rounding would rank those that stand still, and differently in another batch.
    return cosines.clamp_max(STILL).argsort(dim=-1, stable=True)[:, :count]


class DriftState(CacheState):
    """Keys and values of all tokens; signals and outputs of those that flow."""

    def __init__(self, rules: DriftRules, model: DiffusionModel, canvas: Canvas) -> None:
        """Make room.

        Args:
            rules: Of the cache.
            model: Whose layers run.
            canvas: As it is before the first step.
        """
        super().__init__(model)
        self._rules = rules
        self._start = canvas.prompt - model.traits.shift
        self._store = KVStore(model.decoder, len(canvas.ids), canvas.width)
        tokens = canvas.width - self._start
        self._counts = counts_of(rules.ratios, tokens)
        self._tokens = tokens
        self._signals: list[torch.Tensor | None] = [None] * len(self._counts)
        self._kept: list[torch.Tensor | None] = [None] * len(self._counts)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, signals, their factors, and outputs."""
        noted = [each.nbytes for each in (*self._signals, *self._kept) if each is not None]
        return self._store.nbytes + sum(noted) + self._rules.factor_bytes

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone."""
        self._store.keep(rows)
        self._signals = [None if each is None else each[rows] for each in self._signals]
        self._kept = [None if each is None else each[rows] for each in self._kept]

    def step(self, canvas: Canvas) -> Outputs:
        """Recompute everything, all that flows, or what has drifted."""
        spares = min(self._counts) < self._tokens
        whole = not spares or canvas.step % self._rules.refresh == 0
        renewed = whole or canvas.step % self._rules.refresh_generated == 0
        flow = Flow(0 if whole else self._start)
        ground = _ground(self.model, canvas, flow)
        hidden = self.model.decoder.embedding(flow.take(canvas.ids))
        for index, layer in enumerate(self.model.decoder.blocks):
            if renewed or self._counts[index] == self._tokens:
                hidden = self._dense(index, layer, hidden, ground)
            else:
                hidden = self._sparse(index, layer, hidden, ground)
        return Outputs(hidden, flow.start)

    def _dense(
        self, index: int, layer: Layer, hidden: torch.Tensor, ground: _Ground
    ) -> torch.Tensor:
        """All that flows through a layer, `[B, F, M]`; notes signals and what is kept."""
        normed = layer.attention_norm(hidden)
        keys, values = layer.keys(normed, ground.angles), layer.values(normed)
        keys, values = self._store.write(index, ground.flow, keys, values)
        queries = layer.queries(normed, ground.angles)
        output = layer.attended(hidden, queries, keys, values, ground.visible)
        count = hidden.shape[0] * hidden.shape[1]
        self.work.add(index, count, count)
        if self._counts[index] < self._tokens:
            inside = slice(self._start - ground.flow.start, None)
            if self._rules.signal is not None:
                with part("selection"):
                    self._signals[index] = self._rules.signal(index, normed[:, inside])
            kept = output - hidden if self._rules.residual == "change" else output
            self._kept[index] = kept[:, inside].clone()
        return output

    def _sparse(
        self, index: int, layer: Layer, hidden: torch.Tensor, ground: _Ground
    ) -> torch.Tensor:
        """What has drifted through a layer; its output for all that flows, `[B, F, M]`."""
        normed = layer.attention_norm(hidden)
        with part("selection"):
            chosen = self._select(index, layer, normed, ground)
        mine = ground.of(chosen)
        picked, selected = at(hidden, chosen), at(normed, chosen)
        if self._rules.recomputed == "all":
            keys, values = layer.keys(normed, ground.angles), layer.values(normed)
            self._store.write(index, ground.flow, keys, values)
        else:
            self._store.put_keys(index, mine.flow, layer.keys(selected, mine.angles))
            if self._rules.signal is not None:
                self._store.put_values(index, mine.flow, layer.values(selected))
        everyone = hidden.shape[0] * hidden.shape[1]
        renewed = everyone if self._rules.recomputed == "all" else chosen.numel()
        self.work.add(index, chosen.numel(), renewed)
        keys, values = self._store.read(index, ground.flow)
        queries = layer.queries(selected, mine.angles)
        output = layer.attended(picked, queries, keys, values, mine.visible)
        return self._merge(index, hidden, chosen, output, output - picked)

    def _select(
        self, index: int, layer: Layer, normed: torch.Tensor, ground: _Ground
    ) -> torch.Tensor:
        """The tokens to recompute, `[B, K]` among those that flow; notes the new signals."""
        count, noted = self._counts[index], self._signals[index]
        if self._rules.signal is None or noted is None:
            values = layer.values(normed)
            held = self._store.values[index][:, ground.flow.start : -1]
            chosen = most_drifted(values.flatten(2), held.flatten(2), count)
            self._store.put_values(index, ground.flow, values)
            return chosen
        signal = self._rules.signal(index, normed)
        chosen = most_drifted(signal, noted, count)
        if self._rules.reference == "last_step":
            self._signals[index] = signal
        else:
            put(noted, chosen, at(signal, chosen))
        return chosen

    def _merge(
        self,
        index: int,
        hidden: torch.Tensor,
        chosen: torch.Tensor,
        output: torch.Tensor,
        change: torch.Tensor,
    ) -> torch.Tensor:
        """A layer's output `[B, F, M]`, from what is new and what was kept."""
        kept = self._kept[index]
        if kept is None:
            raise RuntimeError("a layer was run sparsely before it was run whole")
        if self._rules.residual == "output":
            put(kept, chosen, output)
            return kept
        put(kept, chosen, change)
        return hidden + kept


@dataclass(frozen=True, slots=True, eq=False)
class _Ground:
    """What a step knows of the tokens that go through a layer."""

    flow: Flow
    """Which ones they are."""
    angles: Angles
    """Of their positions."""
    visible: torch.Tensor | None
    """What they see."""

    def of(self, chosen: torch.Tensor) -> _Ground:
        """The same of the chosen ones, `[B, K]` among them."""
        visible = self.visible
        if visible is not None and visible.shape[2] > 1:
            visible = at(visible[:, 0], chosen)[:, None]
        cosines, sines = self.angles
        flow = Flow(columns=chosen + self.flow.start)
        return _Ground(flow, (at(cosines, chosen), at(sines, chosen)), visible)


def _ground(model: DiffusionModel, canvas: Canvas, flow: Flow) -> _Ground:
    positions = flow.take(canvas.positions)
    visible = visibility(model.traits, canvas.valid, canvas.positions, positions)
    return _Ground(flow, model.decoder.angles(positions), visible)


def at(field: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The chosen tokens `[B, K]` of `[B, F, ...]`."""
    rows = torch.arange(len(chosen), device=chosen.device)[:, None]
    return field[rows, chosen]


def put(field: torch.Tensor, chosen: torch.Tensor, new: torch.Tensor) -> None:
    """Write `[B, K, ...]` at the chosen tokens `[B, K]` of `[B, F, ...]`."""
    rows = torch.arange(len(chosen), device=chosen.device)[:, None]
    field[rows, chosen] = new
