"""Pooling over neighbours in time, wherever they are stored."""

import pytest
import torch

from kvfold.ops.selection import EMPTY
from kvfold.ops.statistics import pool_in_time


def pooled_by_loop(scores: list[float], positions: list[int], kernel: int) -> list[float]:
    """The highest of the kernel's tokens."""
    order = sorted((p, i) for i, p in enumerate(positions) if p >= 0)
    result = [0.0] * len(scores)
    for place, (_, slot) in enumerate(order):
        around = range(place - kernel // 2, place + kernel // 2 + 1)
        near = [scores[order[i][1]] for i in around if 0 <= i < len(order)]
        result[slot] = max(near)
    return result


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
@pytest.mark.parametrize("shared", [True, False])
def test_equals_the_loop(kernel: int, shared: bool):
    generator = torch.Generator().manual_seed(kernel)
    places = 1 if shared else 2
    positions = torch.stack(
        [torch.randperm(40, generator=generator)[:11] for _ in range(3 * places)]
    ).view(3, places, 11)
    positions[1, :, 4] = EMPTY
    positions[2, :, 2:9] = EMPTY
    scores = torch.rand(3, 2, 11, generator=generator)
    scores = scores.masked_fill((positions == EMPTY).expand_as(scores), 0.0)
    actual = pool_in_time(scores, positions, kernel)
    for row in range(3):
        for head in range(2):
            where = positions[row, 0 if shared else head]
            expected = pooled_by_loop(scores[row, head].tolist(), where.tolist(), kernel)
            held = where >= 0
            torch.testing.assert_close(
                actual[row, head][held], torch.tensor(expected)[held], rtol=1e-5, atol=1e-7
            )


def test_fewer_tokens_than_the_kernel():
    actual = pool_in_time(torch.tensor([[[3.0]]]), torch.tensor([[[7]]]), 5)
    torch.testing.assert_close(actual, torch.tensor([[[3.0]]]))


@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_slots_in_order_need_no_sorting(kernel: int):
    generator = torch.Generator().manual_seed(kernel)
    scores, positions = torch.rand(2, 2, 20, generator=generator), torch.arange(20) * 3
    positions = positions.expand(2, 1, 20)
    expected = pool_in_time(scores, positions, kernel)
    assert torch.equal(pool_in_time(scores, positions, kernel, in_order=True), expected)
