"""Which tokens stay and which one goes, against loops."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.ops.selection import EMPTY, keep_indices, protected, turns_to_go, victim


@st.composite
def slots(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions `[B, P, T]` with empty slots, in any order, and scores with many ties."""
    rows, places, total = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 14))
    positions, scores = [], []
    for _ in range(rows * places):
        numbers = draw(st.lists(st.integers(0, 40), min_size=total, max_size=total, unique=True))
        empty = draw(st.lists(st.booleans(), min_size=total, max_size=total))
        positions.append([EMPTY if e else n for n, e in zip(numbers, empty, strict=True)])
        scores.append(draw(st.lists(st.integers(0, 3), min_size=total, max_size=total)))
    shape = (rows, places, total)
    held = torch.tensor(positions, dtype=torch.int32).view(shape)
    return held, torch.tensor(scores).float().view(shape)


def best_positions(
    positions: list[int], scores: list[float], shielded: list[bool], budget: int
) -> list[int]:
    """The protected first, then by score, then the newer."""
    ranked = sorted(
        (math.inf if shield else score, position)
        for shield, score, position in zip(shielded, scores, positions, strict=True)
        if position >= 0
    )
    return sorted(position for _, position in ranked[-budget:])


@settings(deadline=None, max_examples=50)
@given(slots(), st.integers(0, 2**32), st.data())
def test_keep_indices_equals_the_loop(
    drawn: tuple[torch.Tensor, torch.Tensor], seed: int, data: st.DataObject
):
    positions, scores = drawn
    rows, places, total = positions.shape
    generator = torch.Generator().manual_seed(seed)
    shielded = (torch.rand(positions.shape, generator=generator) < 0.2) & (positions >= 0)
    budgets: int | torch.Tensor = data.draw(st.integers(1, total + 2))
    if data.draw(st.booleans()):
        budgets = torch.randint(1, total + 3, (rows,), generator=generator)
    indices, held = keep_indices(scores, positions, shielded, budgets)
    assert indices.shape == held.shape
    assert indices.shape[-1] <= total
    for row in range(rows):
        budget = budgets if isinstance(budgets, int) else int(budgets[row])
        for place in range(places):
            kept = positions[row, place][indices[row, place]][held[row, place]].tolist()
            # In order of position, the held ones before the rest.
            assert kept == best_positions(
                positions[row, place].tolist(),
                scores[row, place].tolist(),
                shielded[row, place].tolist(),
                budget,
            )
            assert held[row, place].tolist() == sorted(held[row, place].tolist(), reverse=True)


def test_of_equal_scores_a_cut_drops_the_older_and_a_token_takes_the_first_slot():
    positions = torch.tensor([[[5, 2, 9, 7]]])
    scores = torch.zeros(1, 1, 4)
    none = torch.zeros(1, 1, 4, dtype=torch.bool)
    indices, held = keep_indices(scores, positions, none, 2)
    assert positions[0, 0][indices[0, 0]].tolist() == [7, 9]
    assert held.all()
    assert victim(scores, positions, none).tolist() == [[[0]]]


def test_each_row_keeps_to_its_own_budget():
    positions = torch.arange(6).expand(2, 1, 6)
    scores = torch.arange(6.0).expand(2, 1, 6)
    none = torch.zeros(2, 1, 6, dtype=torch.bool)
    indices, held = keep_indices(scores, positions, none, torch.tensor([4, 2]))
    assert indices[0, 0].tolist() == [2, 3, 4, 5]
    assert indices[1, 0][held[1, 0]].tolist() == [4, 5]
    assert held.sum(-1).tolist() == [[4], [2]]


@settings(deadline=None, max_examples=50)
@given(slots(), st.integers(0, 2**32), st.booleans())
def test_victim_equals_the_loop(drawn: tuple[torch.Tensor, torch.Tensor], seed: int, ragged: bool):
    positions, scores = drawn
    generator = torch.Generator().manual_seed(seed)
    positions[..., 0] = 41  # at least one token
    shielded = (torch.rand(positions.shape, generator=generator) < 0.3) & (positions >= 0)
    shielded[..., 0] = False
    if ragged:
        room = torch.rand(len(positions), generator=generator) < 0.5
        room &= (positions < 0).any(-1).all(-1)
    else:
        positions = torch.arange(positions.shape[-1], dtype=torch.int32).expand_as(positions)
        room = None
    chosen = victim(scores, positions, shielded, room)
    for row in range(len(positions)):
        for place in range(positions.shape[1]):
            slot = int(chosen[row, place, 0])
            if room is not None and room[row]:
                assert slot == positions[row, place].tolist().index(EMPTY)
                continue
            candidates = [
                (float(scores[row, place, i]), i)
                for i in range(positions.shape[2])
                if positions[row, place, i] >= 0 and not shielded[row, place, i]
            ]
            assert slot == min(candidates)[1]


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(8, 80), st.integers(0, 30), st.integers(0, 60))
def test_protected_are_the_ends_and_leave_a_quarter(
    length: int, budget: int, sinks: int, recent: int
):
    positions = torch.arange(-2, length).clamp_min(EMPTY)[None, None]
    shielded = protected(positions, length, budget, sinks=sinks, recent=recent)
    first, last = min(sinks, budget // 4), min(recent, budget // 2)
    expected = [p for p in range(length) if p < first or p >= length - last]
    assert positions[shielded & (positions >= 0)].tolist() == expected
    assert shielded[positions == EMPTY].all()
    assert len(expected) <= budget - budget // 4
    rows = protected(
        positions, torch.tensor([length]), torch.tensor([budget]), sinks=sinks, recent=recent
    )
    assert torch.equal(rows, shielded)


def test_protected_by_row():
    positions = torch.arange(20).expand(2, 1, 20).clone()
    positions[1, 0, 12:] = EMPTY
    shielded = protected(
        positions, torch.tensor([20, 12]), torch.tensor([16, 8]), sinks=4, recent=32
    )
    shielded &= positions >= 0
    assert positions[0][shielded[0]].tolist() == [*range(4), *range(12, 20)]
    assert positions[1][shielded[1]].tolist() == [0, 1, *range(8, 12)]


def test_scores_that_overflowed_still_give_turns():
    scores = torch.tensor([[[math.inf, math.nan, -math.inf, 1.0, math.inf]]])
    shielded = torch.tensor([[[False, False, False, False, True]]])
    turns = turns_to_go(scores, shielded, 2)
    assert turns.tolist() == [[[0, -1, -2, 0, 0]]]


def test_rows_may_have_turns_of_their_own():
    scores = torch.tensor([[[3.0, 1.0, 2.0, 4.0]], [[3.0, 1.0, 2.0, 4.0]]])
    shielded = torch.tensor([[[False] * 4], [[False, True, True, False]]])
    turns = turns_to_go(scores, shielded, torch.tensor([1, 3]))
    assert turns.tolist() == [[[0, -1, 0, 0]], [[-3, 0, 0, -2]]]
