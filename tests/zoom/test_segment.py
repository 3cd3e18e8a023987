"""Anchors and spans equal slow loops over one row at a time, for any text and any padding."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.zoom.segment import (
    Segmentation,
    anchor_threshold,
    anchors,
    segment,
)

VALUES = st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.25, 1e30, math.inf, math.nan])
"""Few values, so that many are equal, and all that can go wrong."""


def members(found: Segmentation, longest: int) -> torch.Tensor:
    """Indices of each span's tokens, `[B, S, longest]`, -1 past its end."""
    spans = int(found.counts.max()) if len(found.counts) else 0
    held = torch.full((len(found.counts), spans, longest), -1)
    for row, numbers in enumerate(found.span_of.tolist()):
        for span in range(spans):
            indices = [at for at, number in enumerate(numbers) if number == span]
            assert len(indices) <= longest
            held[row, span, : len(indices)] = torch.tensor(indices, dtype=torch.long)
    return held


def left_padded(rows: list[list[float]], total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and mask `[B, total]`; the padding holds what would be seen if it counted."""
    values = torch.tensor([[99.0] * (total - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    return values, torch.arange(total) >= total - lengths[:, None]


def all_of(values: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def slow_threshold(values: list[float], deviations: float) -> float:
    finite = [v for v in (0.0 if math.isnan(v) else v for v in values) if v < math.inf]
    if not finite:
        return math.inf
    mean = sum(finite) / len(finite)
    return mean + deviations * math.sqrt(sum((v - mean) ** 2 for v in finite) / len(finite))


def slow_anchors(values: list[float], threshold: float, sinks: int, most: int | None) -> list[bool]:
    values = [0.0 if math.isnan(value) else value for value in values]
    room = len(values) if most is None else most
    chosen = list(range(len(values)))[: min(sinks, room)]
    others = [i for i in range(len(chosen), len(values)) if values[i] > threshold]
    others.sort(key=lambda i: (-values[i], i))
    chosen += others[: room - len(chosen)]
    return [i in chosen for i in range(len(values))]


def slow_spans(is_anchor: list[bool], shortest: int, longest: int) -> list[list[int]]:
    """The tokens of each span of one row without padding."""
    runs: list[list[int]] = [[]]
    for index, anchor in enumerate(is_anchor):
        if anchor:
            runs.append([])
        else:
            runs[-1].append(index)
    spans = []
    for run in runs:
        if len(run) >= shortest:
            pieces = math.ceil(len(run) / longest)
            ends = [math.ceil(len(run) * j / pieces) for j in range(pieces + 1)]
            spans += [run[a:b] for a, b in pairwise(ends)]
    return spans


def spans_of(segmentation: Segmentation, longest: int, row: int = 0) -> list[list[int]]:
    found = members(segmentation, longest)[row].tolist()
    spans = [[i for i in span if i >= 0] for span in found]
    assert all(span[: len(held)] == held for span, held in zip(found, spans, strict=True))
    return [held for held in spans if held]


@st.composite
def texts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[list[float]]]:
    """A left-padded batch of surprisals, its mask, and its rows."""
    rows = draw(st.lists(st.lists(VALUES, max_size=60), min_size=1, max_size=4))
    return *left_padded(rows, max(map(len, rows)) + draw(st.integers(0, 3))), rows


@settings(deadline=None, max_examples=100)
@given(texts(), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]))
def test_thresholds_equal_the_loop(
    drawn: tuple[torch.Tensor, torch.Tensor, list[list[float]]], deviations: float
):
    surprisal, tokens, rows = drawn
    found = anchor_threshold(surprisal, tokens, deviations)
    assert found.dtype == torch.float32
    for row, threshold in zip(rows, found.tolist(), strict=True):
        # A mean less its deviation may be nearly nothing, of numbers that are not.
        highest = max((value for value in row if value < math.inf), default=0.0)
        error = 1e-6 * max(1.0, highest)
        assert threshold == pytest.approx(slow_threshold(row, deviations), rel=1e-6, abs=error)


@settings(deadline=None, max_examples=100)
@given(
    texts(),
    st.sampled_from([-1.0, 0.0, 0.5, 1.9, math.inf]),
    st.integers(0, 5),
    st.none() | st.integers(0, 20),
)
def test_anchors_equal_the_loop(
    drawn: tuple[torch.Tensor, torch.Tensor, list[list[float]]],
    threshold: float,
    sinks: int,
    most: int | None,
):
    surprisal, tokens, rows = drawn
    thresholds = torch.full((len(rows),), threshold)
    found = anchors(surprisal, tokens, thresholds, sinks=sinks, most=most)
    assert not (found & ~tokens).any()
    for row, values in enumerate(rows):
        assert found[row][tokens[row]].tolist() == slow_anchors(values, threshold, sinks, most)


def test_the_threshold_is_the_mean_plus_population_deviations():
    surprisal = torch.tensor([[1.0, 1.0, 3.0, 3.0], [5.0, 5.0, 99.0, 99.0]])
    tokens = torch.tensor([[True] * 4, [True, True, False, False]])
    assert anchor_threshold(surprisal, tokens).tolist() == [3.0, 5.0]
    assert anchor_threshold(surprisal, tokens, 0.5).tolist() == [2.5, 5.0]
    found = anchors(surprisal, tokens, torch.tensor([2.5, 4.0]), sinks=0, most=None)
    assert found.tolist() == [[False, False, True, True], [True, True, False, False]]


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 11.7, 1e30, 1e-30, math.nan], ids=str)
@pytest.mark.parametrize("length", [1, 2, 3, 97, 4096])
def test_all_equal_surprisal_gives_only_sinks(value: float, length: int):
    surprisal, tokens = left_padded([[value] * length], length + 5)
    thresholds = anchor_threshold(surprisal, tokens)
    found = anchors(surprisal, tokens, thresholds, sinks=4, most=None)
    assert found[0].nonzero().flatten().tolist() == [5 + i for i in range(min(4, length))]


def test_what_is_no_number_or_infinite():
    values = [math.nan, 1.0, math.inf, 1.0, math.nan, 1.0, -math.inf, math.inf]
    surprisal = torch.tensor([values])
    threshold = anchor_threshold(surprisal, all_of(surprisal))
    assert threshold.item() == pytest.approx(1.0)  # of 0 1 1 0 1 0: mean and deviation 1 / 2
    found = anchors(surprisal, all_of(surprisal), threshold, sinks=0, most=None)
    assert found[0].nonzero().flatten().tolist() == [2, 7]
    found = anchors(surprisal, all_of(surprisal), threshold, sinks=1, most=2)
    assert found[0].nonzero().flatten().tolist() == [0, 2]


def test_fewer_anchors_than_sinks():
    surprisal = torch.tensor([[1.0, 2.0, 3.0, 9.0]])
    found = anchors(surprisal, all_of(surprisal), torch.tensor([0.0]), sinks=3, most=2)
    assert found.tolist() == [[True, True, False, False]]
    assert not anchors(surprisal, all_of(surprisal), torch.zeros(1), sinks=3, most=0).any()


@pytest.mark.parametrize(("sinks", "most"), [(-1, None), (0, -1)])
def test_negative_numbers_of_anchors_are_refused(sinks: int, most: int | None):
    surprisal = torch.zeros(1, 3)
    with pytest.raises(ConfigError, match="from 0 up"):
        anchors(surprisal, all_of(surprisal), torch.zeros(1), sinks=sinks, most=most)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, list[list[bool]]]:
    """Anchors of a left-padded batch, its mask, and its rows; runs are of all lengths."""
    runs = st.lists(st.integers(0, 70), max_size=6)
    rows = [
        [flag for run in lengths for flag in [False] * run + [True]]
        + [False] * draw(st.integers(0, 70))
        for lengths in draw(st.lists(runs, min_size=1, max_size=3))
    ]
    total = max(map(len, rows)) + draw(st.integers(0, 3))
    found, tokens = left_padded([[float(flag) for flag in row] for row in rows], total)
    return found.bool(), tokens, rows


@settings(deadline=None, max_examples=150)
@given(cuts(), st.integers(1, 40), st.integers(0, 40))
def test_spans_are_a_partition_and_equal_the_loop(
    drawn: tuple[torch.Tensor, torch.Tensor, list[list[bool]]], shortest: int, more: int
):
    is_anchor, tokens, rows = drawn
    longest = shortest + more
    found = segment(is_anchor, tokens, shortest=shortest, longest=longest)
    assert (found.span_of.dtype, found.counts.dtype) == (torch.int64, torch.int64)
    assert members(found, longest).shape == (len(rows), int(found.counts.max()), longest)
    for row, flags in enumerate(rows):
        start = tokens.shape[1] - len(flags)
        expected = slow_spans(flags, shortest, longest)
        spans = [[i - start for i in span] for span in spans_of(found, longest, row)]
        assert spans == expected
        assert int(found.counts[row]) == len(expected)
        numbers = {i: number for number, span in enumerate(expected) for i in span}
        assert found.span_of[row, start:].tolist() == [
            numbers.get(i, -1) for i in range(len(flags))
        ]
        assert (found.span_of[row, :start] == -1).all()
        for span in spans:
            assert min(shortest, (longest + 1) // 2) <= len(span) <= longest
            assert span == list(range(span[0], span[-1] + 1))
            assert not any(flags[i] for i in span)
        # What is neither an anchor nor in a span is a run too short for one.
        raw = [not flag and i not in numbers for i, flag in enumerate(flags)]
        assert max(map(len, "".join("x" if r else " " for r in raw).split()), default=0) < shortest


@pytest.mark.parametrize(("shortest", "longest"), [(16, 32), (1, 1), (5, 5), (10, 13), (1, 64)])
def test_every_length_at_every_place(shortest: int, longest: int):
    # Row r of a length has its run after r anchors, and anchors to the end.
    for length in range(1, 81):
        total = length + 5
        indices, first = torch.arange(total), torch.arange(6)[:, None]
        is_anchor = (indices < first) | (indices >= first + length)
        found = segment(is_anchor, all_of(is_anchor), shortest=shortest, longest=longest)
        for row in range(6):
            expected = slow_spans(is_anchor[row].tolist(), shortest, longest)
            assert spans_of(found, longest, row) == expected
        lengths = (members(found, longest) >= 0).sum(-1)
        if length >= shortest:
            assert (lengths.sum(-1) == length).all()
            assert found.counts.tolist() == [math.ceil(length / longest)] * 6
            assert int(lengths.max() - lengths.min()) <= 1


def test_one_span_only_and_one_long_run():
    none = torch.zeros(1, 20, dtype=torch.bool)
    found = segment(none, ~none)
    assert found.span_of.tolist() == [[0] * 20]
    assert members(found, 32).tolist() == [[[*range(20), *[-1] * 12]]]
    none = torch.zeros(1, 8192, dtype=torch.bool)
    found = segment(none, ~none)
    assert found.counts.tolist() == [256]
    assert members(found, 32).flatten().tolist() == list(range(8192))


@pytest.mark.parametrize("shape", [(2, 0), (2, 7), (0, 7)], ids=str)
def test_no_tokens_at_all(shape: tuple[int, int]):
    surprisal, tokens = torch.rand(shape), torch.zeros(shape, dtype=torch.bool)
    thresholds = anchor_threshold(surprisal, tokens)
    assert thresholds.tolist() == [math.inf] * shape[0]
    found = segment(anchors(surprisal, tokens, thresholds, sinks=4, most=3), tokens)
    assert found.span_of.shape == shape
    assert (found.span_of == -1).all()
    assert found.counts.tolist() == [0] * shape[0]


@pytest.mark.parametrize(("shortest", "longest"), [(0, 32), (33, 32), (1, 0)])
def test_lengths_that_cannot_be_are_refused(shortest: int, longest: int):
    none = torch.zeros(1, 20, dtype=torch.bool)
    with pytest.raises(ConfigError, match=f"spans of {shortest} to {longest} tokens"):
        segment(none, ~none, shortest=shortest, longest=longest)
