"""Runs of different lengths: put together and taken out again."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.zoom.runs import packed, runs, starts_of

ROWS = st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=1, max_size=3)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(sizes=ROWS)
def test_runs_come_back(sizes: list[list[int]]):
    """The first so many of 4 entries of each of 5 runs, in 2 places, with two numbers each."""
    counts = torch.tensor(sizes)
    tensor = torch.arange(len(sizes) * 2 * 20 * 2).view(len(sizes), 2, 20, 2)
    used = (torch.arange(4) < counts[:, :, None]).flatten(1)
    held = packed(tensor, used)
    assert held.shape == (len(sizes), 2, max(map(sum, sizes)), 2)
    starts = starts_of(counts)
    for row, lengths in enumerate(sizes):
        for place in range(2):
            for run, length in enumerate(lengths):
                if not held.shape[2]:
                    continue
                found = runs(held, torch.tensor([row * 2 + place]), starts[row, run, None], 4)
                expected = tensor[row, place, run * 4 : run * 4 + length]
                assert found.shape == (1, 4, 2)
                assert torch.equal(found[0, :length], expected)
