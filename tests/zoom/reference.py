"""What attention at two resolutions computes, in loops over single numbers (float64)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvfold.attention import Scoring
from kvfold.zoom.attention import Exact
from kvfold.zoom.sketch_router import SketchRouter
from kvfold.zoom.spans import Fold, Spans
from kvfold.zoom.tiers import RawTier

Vector = list[float]


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """What the loops found."""

    output: torch.Tensor
    """`[B, H, Q, D]` in float64."""
    masses: torch.Tensor
    """Estimated logarithm of each span's weight, `[B, H, Q, S]`; minus infinity for no span."""
    chosen: dict[tuple[int, int, int], set[int]]
    """Spans that are expanded, by row, kv head and query."""


def make_spans(directions: int, longest: int, dtype: torch.dtype | None) -> Spans:
    """No spans yet, to be ranked by a sketch."""
    return Spans(SketchRouter(directions), RawTier(longest), dtype)


def fold_of(lengths: list[list[int]]) -> Fold:
    """New spans of so many tokens, of each row; a row's tokens are its first slots, in order."""
    total, most = max(map(sum, lengths)), max(map(len, lengths))
    span_of = torch.full((len(lengths), total), most)
    weights, is_token = torch.zeros(len(lengths), total), torch.zeros(len(lengths), total).bool()
    for row, spans in enumerate(lengths):
        start = 0
        for span, length in enumerate(spans):
            inside = slice(start, start + length)
            span_of[row, inside], is_token[row, inside] = span, True
            weights[row, inside] = torch.arange(1, length + 1) / (length * (length + 1) / 2)
            start += length
    order = torch.arange(total).expand(len(lengths), -1)
    padded = [[*spans, *[0] * (most - len(spans))] for spans in lengths]
    none = torch.zeros(len(lengths), 1, 0, dtype=torch.long)
    return Fold(
        tokens=order, positions=order.where(is_token, -1), span_of=span_of, weights=weights,
        lengths=torch.tensor(padded), stay=none, held=none.bool(), anchors=none[:, 0],
    )  # fmt: skip


def zoom_reference(
    query: torch.Tensor, exact: Exact, spans: Spans, expanded: int, scoring: Scoring
) -> Reference:
    """The same as `zoom_attention`, and what leads to it."""
    batch, heads, count, width = query.shape
    groups = exact.keys.shape[1]
    output = torch.zeros(batch, heads, count, width, dtype=torch.float64)
    masses = torch.full((batch, heads, count, spans.lengths.shape[1]), -math.inf).double()
    chosen = {}
    for row in range(batch):
        for group in range(groups):
            own = range(group * heads // groups, (group + 1) * heads // groups)
            for position in range(count):
                near, far = {}, {}
                for head in own:
                    scaled = [float(x) * scoring.scaling for x in query[row, head, position]]
                    near[head] = _near(scaled, exact, row, group, position, scoring)
                    far[head] = _far(scaled, spans, row, group, scoring)
                    for span, mass in far[head].items():
                        masses[row, head, position, span] = mass
                zoomed = _choose(near, far, expanded, scoring)
                chosen[row, group, position] = zoomed
                for head in own:
                    scaled = [float(x) * scoring.scaling for x in query[row, head, position]]
                    parts = list(near[head])
                    for span, mass in far[head].items():
                        if span in zoomed:
                            parts += _inside(scaled, spans, row, group, span, scoring)
                        else:
                            parts.append((mass, spans.means[row, group, span].tolist()))
                    sink = None if scoring.sinks is None else float(scoring.sinks[head])
                    output[row, head, position] = torch.tensor(_mix(parts, sink, width)).double()
    return Reference(output, masses, chosen)


def _near(
    query: Vector, exact: Exact, row: int, group: int, position: int, scoring: Scoring
) -> list[tuple[float, Vector]]:
    """Score and value of each exact token that the query sees."""
    found = []
    for token in range(exact.keys.shape[2]):
        if exact.visible is None or bool(exact.visible[row, 0, position, token]):
            key, value = (side[row, group, token].tolist() for side in (exact.keys, exact.values))
            found.append((_capped(_dot(query, key), scoring), value))
    return found


def _far(
    query: Vector, spans: Spans, row: int, group: int, scoring: Scoring
) -> dict[int, float]:  # fmt: skip
    """Estimated mass of each span that the row has."""
    router = spans.router
    assert isinstance(router, SketchRouter)
    assert router.sketch is not None
    look = router.sketch.look[row, group].T.tolist()
    *steps, level = [_dot(query, direction) for direction in look]
    bytes_of = router.codes[row, group].T.tolist()
    found = {}
    for span, length in enumerate(spans.lengths[row].tolist()):
        start = int(spans.starts[row, span])
        scores = []
        for token in range(start, start + length):
            low = [byte % 16 for byte in bytes_of[token]]
            scores.append(_capped(level + _dot(steps, [*low, *bytes_of[token]]), scoring))
        if length:
            found[span] = _log_sum(scores)
    return found


def _choose(
    near: dict[int, list[tuple[float, Vector]]],
    far: dict[int, dict[int, float]],
    expanded: int,
    scoring: Scoring,
) -> set[int]:
    """The spans that take the largest share of any head's attention."""
    shares: dict[int, float] = {}
    for head, masses in far.items():
        everything = [score for score, _ in near[head]] + list(masses.values())
        if scoring.sinks is not None:
            everything.append(float(scoring.sinks[head]))
        total = _log_sum(everything)
        for span, mass in masses.items():
            shares[span] = max(shares.get(span, -math.inf), mass - total)
    return set(sorted(shares, key=shares.__getitem__, reverse=True)[:expanded])


def _inside(
    query: Vector, spans: Spans, row: int, group: int, span: int, scoring: Scoring
) -> list[tuple[float, Vector]]:
    """Score and value of each token of a span."""
    start, found = int(spans.starts[row, span]), []
    for token in range(start, start + int(spans.lengths[row, span])):
        key = spans.slow.keys[row, group, token].tolist()
        value = spans.slow.values[row, group, token].tolist()
        found.append((_capped(_dot(query, key), scoring), value))
    return found


def _mix(parts: list[tuple[float, Vector]], sink: float | None, width: int) -> Vector:
    """Values weighted by the softmax of their scores."""
    total = _log_sum([score for score, _ in parts] + ([] if sink is None else [sink]))
    output = [0.0] * width
    for score, value in parts:
        weight = math.exp(score - total)
        output = [have + weight * more for have, more in zip(output, value, strict=True)]
    return output


def _capped(score: float, scoring: Scoring) -> float:
    cap = scoring.softcap
    return score if cap is None else math.tanh(score / cap) * cap


def _dot(left: Vector, right: Vector) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _log_sum(scores: list[float]) -> float:
    highest = max(scores)
    return highest + math.log(sum(math.exp(score - highest) for score in scores))
