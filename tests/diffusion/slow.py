"""What caches compute, for one row, token by token and layer by layer from a plain notebook.

A notebook holds for every layer and token the key and value last computed. Nothing here is shared
with the fast path but a layer's own projections, applied to single tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import torch

from kvfold.diffusion import DiffusionModel
from kvfold.diffusion.caches.drift import STILL
from kvfold.diffusion.decoder import Layer

Vector = torch.Tensor
Places = dict[int, Vector]


@dataclass(slots=True)
class Notes:
    """One layer's."""

    keys: Places = field(default_factory=dict)
    values: Places = field(default_factory=dict)
    signals: Places = field(default_factory=dict)
    changes: Places = field(default_factory=dict)
    outputs: Places = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlowRules:
    """Those of a cache that measures drift."""

    shares: list[float]
    whole_values: bool
    rank: int | None
    refresh: int
    refresh_generated: int
    everyone: bool
    since_update: bool
    keep_output: bool


def slow_tokens(
    model: DiffusionModel, steps: list[list[int]], fresh: list[set[int]]
) -> list[Places]:
    """The last layer's outputs of the fresh tokens after each step, the same in all layers."""
    book = [Notes() for _ in model.decoder.layers]
    found = []
    for ids, places in zip(steps, fresh, strict=True):
        hidden = _embedded(model, ids, places)
        for notes, layer in zip(book, model.decoder.blocks, strict=True):
            for place in places:
                _note(model, layer, notes, place, layer.attention_norm(hidden[place]))
            hidden = {p: _output(model, layer, notes, p, hidden[p]) for p in places}
        found.append(hidden)
    return found


def slow_drift(
    model: DiffusionModel, steps: list[list[int]], start: int, rules: SlowRules
) -> list[tuple[Places, list[list[int]]]]:
    """The last layer's outputs after each step, and the tokens that each layer selected."""
    book = [Notes() for _ in model.decoder.layers]
    found = []
    for number, ids in enumerate(steps):
        whole = number % rules.refresh == 0
        renewed = whole or number % rules.refresh_generated == 0
        flowing = range(0 if whole else start, len(ids))
        hidden, chosen, left = _embedded(model, ids, set(flowing)), [], Fraction(0)
        for index, (notes, layer) in enumerate(zip(book, model.decoder.blocks, strict=True)):
            normed = {place: layer.attention_norm(hidden[place]) for place in flowing}
            signals = {p: _signal(model, layer, index, normed[p], rules) for p in flowing}
            share = Fraction(rules.shares[index]) * (len(ids) - start) + left
            count = max(1, int(share))
            left = max(Fraction(0), share - count)
            picked = list(flowing)
            if not renewed and count < len(ids) - start:
                turned = {p: _cosine(signals[p], notes.signals[p]) for p in flowing}
                picked = sorted(flowing, key=turned.__getitem__)[:count]
            for place in flowing:
                if rules.everyone or place in picked:
                    _note(model, layer, notes, place, normed[place])
                if rules.whole_values:
                    notes.values[place] = _value(model, layer, normed[place])
                if place in picked or not rules.since_update:
                    notes.signals[place] = signals[place]
            hidden = _merged(model, layer, notes, hidden, picked, rules)
            chosen.append(sorted(picked))
        found.append((hidden, chosen))
    return found


def _merged(
    model: DiffusionModel,
    layer: Layer,
    notes: Notes,
    hidden: Places,
    picked: list[int],
    rules: SlowRules,
) -> Places:
    for place in picked:
        notes.outputs[place] = _output(model, layer, notes, place, hidden[place])
        notes.changes[place] = notes.outputs[place] - hidden[place]
    if rules.keep_output:
        return {place: notes.outputs[place] for place in hidden}
    return {place: hidden[place] + notes.changes[place] for place in hidden}


def _embedded(model: DiffusionModel, ids: list[int], places: set[int]) -> Places:
    return {place: model.decoder.embedding.weight[ids[place]] for place in places}


def _note(model: DiffusionModel, layer: Layer, notes: Notes, place: int, normed: Vector) -> None:
    angles = model.decoder.angles(torch.tensor([[place]]))
    notes.keys[place] = layer.keys(normed[None, None], angles)[0, 0]
    notes.values[place] = _value(model, layer, normed)


def _value(model: DiffusionModel, layer: Layer, normed: Vector) -> Vector:
    return layer.value(normed).view(model.shape.kv_heads, -1)


def _output(
    model: DiffusionModel, layer: Layer, notes: Notes, place: int, hidden: Vector
) -> Vector:
    """The layer's output of one token against all that is noted."""
    angles = model.decoder.angles(torch.tensor([[place]]))
    queries = layer.queries(layer.attention_norm(hidden)[None, None], angles)[0, 0]
    share, mixed = model.shape.query_heads // model.shape.kv_heads, []
    for head, query in enumerate(queries):
        group = head // share
        keys = torch.stack([notes.keys[each][group] for each in sorted(notes.keys)])
        values = torch.stack([notes.values[each][group] for each in sorted(notes.keys)])
        mixed.append((keys @ query / model.shape.head_dim**0.5).softmax(-1) @ values)
    middle = hidden + layer.output(torch.cat(mixed))
    normed = layer.mlp_norm(middle)
    return middle + layer.down(layer.activation(layer.gate(normed)) * layer.up(normed))


def _signal(
    model: DiffusionModel, layer: Layer, index: int, normed: Vector, rules: SlowRules
) -> Vector:
    """The values, or their part in the strongest directions by torch's own SVD."""
    value = layer.value(normed)
    if rules.whole_values or rules.rank is None:
        return value
    left = torch.linalg.svd(layer.value.weight, full_matrices=False).U[:, : rules.rank]
    return left.T @ value


def _cosine(first: Vector, second: Vector) -> float:
    cosine = torch.nn.functional.cosine_similarity(first.double(), second.double(), dim=0)
    return min(float(cosine), STILL)
