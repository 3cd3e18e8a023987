"""Folding divides the exact tokens of each row once: what stays, and what goes to which span."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.cache.slots import Slots
from kvfold.ops.selection import EMPTY
from kvfold.zoom.fold import Segmenting, plan_fold
from kvfold.zoom.spans import Fold

HOW = Segmenting(sinks=4, deviations=1.0, shortest=16, longest=32)


def slots_at(positions: list[list[int]]) -> Slots:
    """Slots that hold tokens of these positions, in this order; -1 for none."""
    slots, shape = Slots(shared=True), (len(positions), 1, len(positions[0]), 2)
    slots.append(torch.zeros(shape), torch.zeros(shape), headroom=0)
    slots.place(slice(0, len(slots)), torch.tensor(positions))
    return slots


def row(length: int, total: int) -> list[int]:
    """Positions of one left-padded row."""
    return [EMPTY] * (total - length) + list(range(length))


def noise(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(rows, count, generator=draw).log().neg().square()


def plan(
    positions: list[list[int]],
    surprisal: torch.Tensor,
    *,
    settled: list[int] | None = None,
    until: list[int] | None = None,
    how: Segmenting = HOW,
    most: int | list[int] = 1000,
) -> Fold:
    ends = [max(each) + 1 for each in positions]
    room = [most] * len(positions) if isinstance(most, int) else most
    return plan_fold(
        slots_at(positions), surprisal, torch.tensor(settled or [0] * len(positions)),
        torch.tensor(ends if until is None else until), how, torch.tensor(room),
        torch.full((len(positions),), how.sinks),
    )  # fmt: skip


def spans_of(fold: Fold, index: int) -> list[list[int]]:
    """Positions in each span of a row."""
    found: list[list[int]] = [[] for _ in range(fold.lengths.shape[1])]
    for position, span in zip(
        fold.positions[index].tolist(), fold.span_of[index].tolist(), strict=True
    ):
        if position >= 0:
            found[span].append(position)
    return [span for span in found if span]


def stays_of(fold: Fold, positions: list[list[int]], index: int) -> list[int]:
    """Positions that stay exact in a row."""
    slots = fold.stay[index, 0][fold.held[index, 0]].tolist()
    return [positions[index][slot] for slot in slots]


def check(
    fold: Fold,
    positions: list[list[int]],
    settled: list[int],
    until: list[int],
    how: Segmenting,
    most: int,
) -> None:
    """What holds of every fold."""
    for index, held in enumerate(positions):
        spans, stays = spans_of(fold, index), stays_of(fold, positions, index)
        inside = [position for span in spans for position in span]
        assert sorted(inside + stays) == sorted(p for p in held if p >= 0), "each once"
        assert stays == sorted(stays)
        assert inside == sorted(inside)
        assert all(settled[index] <= position < until[index] for position in inside)
        assert not set(inside) & set(range(how.sinks))
        for span in spans:
            assert span == list(range(span[0], span[0] + len(span))), "one run"
            assert min(how.shortest, math.ceil(how.longest / 2)) <= len(span) <= how.longest
        lengths = [length for length in fold.lengths[index].tolist() if length]
        assert lengths == [len(span) for span in spans]
        slots = [held.index(position) for position in inside]
        assert fold.tokens[index, : len(slots)].tolist() == slots
        for number in range(len(spans)):
            weights = fold.weights[index][fold.span_of[index] == number]
            assert float(weights.sum()) == pytest.approx(1, abs=1e-5)
            assert bool((weights >= 0).all())
        divided = range(max(settled[index], how.sinks), until[index])
        if most and spans:
            exact = sum(position in divided for position in stays)
            run = min(how.shortest - 1, len(divided))
            assert exact <= max(most, run), "anchors and short runs keep to what they may take"


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=3),
    window=st.integers(0, 40),
    sinks=st.integers(0, 5),
    shortest=st.integers(1, 18),
    extra=st.integers(0, 20),
    most=st.integers(0, 60),
    deviations=st.sampled_from([-10.0, 0.0, 1.0, 3.0]),
    seed=st.integers(0, 10**6),
    special=st.sampled_from([None, 0.0, 1.0, math.inf, math.nan, 3e38]),
)
def test_any_text(
    lengths: list[int], window: int, sinks: int, shortest: int, extra: int, most: int,
    deviations: float, seed: int, special: float | None,
):  # fmt: skip
    total = max(lengths)
    how = Segmenting(sinks, deviations, shortest, max(2, shortest + extra))
    positions = [row(length, total) for length in lengths]
    surprisal = noise(len(lengths), total, seed)
    if special is not None:
        surprisal[:, seed % 3 :: 5] = special
    until = [max(length - window, 0) for length in lengths]
    fold = plan(positions, surprisal, until=until, how=how, most=most)
    check(fold, positions, [0] * len(lengths), until, how, most)


@pytest.mark.parametrize("length", range(1, 81))
def test_boundary_lengths(length: int):
    positions, surprisal = [row(length, length)], noise(1, length, length)
    until = [max(length - 16, 0)]
    fold = plan(positions, surprisal, until=until, most=4)
    check(fold, positions, [0], until, HOW, 4)
    assert bool(spans_of(fold, 0)) == (length >= 16 + HOW.sinks + HOW.shortest)


def test_a_second_fold_leaves_what_is_settled():
    positions = [[0, 1, 2, 3, 9, 25, *range(60, 120)], [EMPTY, 0, 1, 2, 3, 20, *range(60, 120)]]
    fold = plan(positions, noise(2, 66), settled=[60, 60], until=[104, 101], most=3)
    check(fold, positions, [60, 60], [104, 101], HOW, 3)
    assert stays_of(fold, positions, 0)[:6] == [0, 1, 2, 3, 9, 25]
    assert stays_of(fold, positions, 1)[:5] == [0, 1, 2, 3, 20]


def test_tokens_stand_in_any_order():
    order = torch.randperm(90, generator=torch.Generator().manual_seed(1))
    surprisal = noise(1, 90)
    straight = plan([list(range(90))], surprisal, until=[70], most=5)
    mixed = plan([order.tolist()], surprisal[:, order], until=[70], most=5)
    assert spans_of(mixed, 0) == spans_of(straight, 0)
    assert stays_of(mixed, [order.tolist()], 0) == stays_of(straight, [list(range(90))], 0)
    torch.testing.assert_close(mixed.weights, straight.weights)


@pytest.mark.parametrize("deviations", [0.5, 1.0])
def test_a_padded_row_equals_the_row_alone(deviations: float):
    lengths, total = [100, 64, 37, 3], 100
    how = Segmenting(4, deviations, 4, 32)
    positions = [row(length, total) for length in lengths]
    surprisal = noise(4, total)
    until = [max(length - 16, 0) for length in lengths]
    for most in ([0] * 4, [1000] * 4, [30, 9, 2, 0]):
        together = plan(positions, surprisal, until=until, how=how, most=most)
        for index, length in enumerate(lengths):
            single = [list(range(length))]
            alone = plan(
                single, surprisal[index : index + 1, total - length :], until=[until[index]],
                how=how, most=most[index],
            )  # fmt: skip
            assert spans_of(together, index) == spans_of(alone, 0)
            assert stays_of(together, positions, index) == stays_of(alone, single, 0)
            count = alone.weights.shape[1]
            torch.testing.assert_close(together.weights[index, :count], alone.weights[0])


def test_no_room_is_no_anchors():
    surprisal = noise(1, 200)
    fold = plan([list(range(200))], surprisal, most=0)
    assert stays_of(fold, [list(range(200))], 0) == [0, 1, 2, 3]
    assert sum(map(len, spans_of(fold, 0))) == 196


def test_anchors_are_the_most_surprising():
    surprisal = torch.ones(1, 200)
    surprisal[0, [60, 120]] = torch.tensor([9.0, 8.0])
    fold = plan([list(range(200))], surprisal, most=1)
    assert stays_of(fold, [list(range(200))], 0) == [0, 1, 2, 3, 60]
    fold = plan([list(range(200))], surprisal, most=2)
    assert stays_of(fold, [list(range(200))], 0) == [0, 1, 2, 3, 60, 120]


def test_fewer_anchors_where_short_runs_take_the_room():
    """Anchors ten tokens apart would keep all exact."""
    surprisal = torch.ones(1, 200)
    surprisal[0, 10::10] = torch.arange(19) + 5.0
    fold = plan([list(range(200))], surprisal, most=30)
    stays = stays_of(fold, [list(range(200))], 0)
    assert len(stays) <= 34
    assert 190 in stays


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_equal_surprisal_has_no_anchors_and_even_weights(value: float):
    fold = plan([list(range(100))], torch.full((1, 100), value))
    assert stays_of(fold, [list(range(100))], 0) == [0, 1, 2, 3]
    assert fold.lengths.tolist() == [[32, 32, 32]]
    torch.testing.assert_close(fold.weights, torch.full((1, 96), 1 / 32))


def test_weights_are_shares_of_surprisal():
    surprisal = torch.ones(1, 20)
    surprisal[0, 7] = 5.0
    how = Segmenting(4, 100.0, 16, 32)
    fold = plan([list(range(20))], surprisal, how=how)
    expected = torch.full((1, 16), 1 / 20)
    expected[0, 3] = 5 / 20
    torch.testing.assert_close(fold.weights, expected)
