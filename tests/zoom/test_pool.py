"""The pool of expanded spans: it always holds what was chosen last, and moves no more than that."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.zoom.spans import Spans
from tests.zoom.reference import fold_of, make_spans

ROWS, GROUPS, WIDTH, LONGEST = 2, 3, 4, 5
LENGTHS = [[5, 3, 4, 1, 5, 2], [2, 5, 5, 3]]


def spans() -> Spans:
    held, fold = make_spans(2, LONGEST, None), fold_of(LENGTHS)
    draw = torch.Generator().manual_seed(0)
    shape = (ROWS, GROUPS, fold.tokens.shape[1], WIDTH)
    keys, values = (torch.randn(shape, generator=draw) for _ in range(2))
    held.add(keys, values, fold, torch.eye(WIDTH).expand(ROWS, GROUPS, -1, -1))
    return held


def tokens_of(held: Spans, row: int, head: int, span: int) -> list[list[float]]:
    start, end = int(held.starts[row, span]), int(held.ends[row, span])
    both = torch.cat([held.slow.keys, held.slow.values], dim=-1)
    return both[row, head, start:end].tolist()


def check(held: Spans, chosen: torch.Tensor) -> None:
    """Of every row and kv head, the tokens of the chosen spans in some order."""
    _, found = held.expand(chosen[:, :, None])
    for row in range(ROWS):
        for head in range(GROUPS):
            actual = [
                tokens[is_token].tolist()
                for tokens, is_token in zip(
                    found.tokens[row, head, 0], found.is_token[row, head, 0], strict=True
                )
            ]
            expected = [tokens_of(held, row, head, span) for span in chosen[row, head].tolist()]
            assert sorted(actual) == sorted(expected)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(places=st.integers(1, 6), seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=6))
def test_what_is_chosen_is_held(places: int, seeds: list[int]):
    held, before = spans(), None
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(6, generator=draw)[:places] for _ in range(ROWS * GROUPS)]
        chosen, moved = torch.stack(orders).view(ROWS, GROUPS, places), held.moved
        check(held, chosen)
        expected = 0
        for row in range(ROWS):
            for head in range(GROUPS):
                known = set() if before is None else set(before[row, head].tolist())
                new = set(chosen[row, head].tolist()) - known
                expected += sum(int(held.lengths[row, span]) for span in new)
        assert held.moved - moved == expected
        before = chosen


def test_what_stays_chosen_does_not_move():
    held, chosen = spans(), torch.tensor([4, 0, 2]).expand(ROWS, GROUPS, -1)
    check(held, chosen)
    moved = held.moved
    check(held, chosen.flip(-1))
    assert held.moved == moved > 0


def test_what_is_chosen_may_be_changed_afterwards():
    held, chosen = spans(), torch.tensor([0, 1]).repeat(ROWS, GROUPS, 1)
    held.expand(chosen[:, :, None])
    chosen.fill_(3)
    check(held, torch.tensor([0, 1]).expand(ROWS, GROUPS, -1))


def test_other_rows_begin_anew():
    held = spans()
    check(held, torch.tensor([0, 1]).expand(ROWS, GROUPS, -1))
    held.map(lambda tensor: tensor.flip(0))
    check(held, torch.tensor([0, 1]).expand(ROWS, GROUPS, -1))


def test_its_bytes_are_what_an_expanded_span_is_said_to_take():
    held = spans()
    held.expand(torch.tensor([0, 1, 5]).expand(ROWS, GROUPS, -1)[:, :, None])
    assert held.pool is not None
    assert held.pool.nbytes == 3 * held.bytes_expanded
