"""Intervals of means."""

from __future__ import annotations

import pytest
import torch

from kvfold.evaluation.statistics import Interval, Share


def test_interval_agrees_with_the_normal_one() -> None:
    values = torch.randn(400, generator=torch.Generator().manual_seed(0)) + 5
    interval = Interval.of(values, seed=0)
    half = 1.96 * float(values.std()) / 20
    assert interval.mean == pytest.approx(float(values.mean()))
    assert interval.low == pytest.approx(interval.mean - half, abs=0.02)
    assert interval.high == pytest.approx(interval.mean + half, abs=0.02)
    assert interval == Interval.of(values, seed=0)


def test_interval_of_equal_numbers_has_no_width() -> None:
    assert Interval.of(torch.zeros(3), seed=0) == Interval(0.0, 0.0, 0.0, 3)


@pytest.mark.parametrize(
    ("right", "count", "bounds"),
    [
        (7, 10, (0.3968, 0.8922)),
        (0, 10, (0.0, 0.2775)),
        (10, 10, (0.7225, 1.0)),
        (54, 60, (0.7985, 0.9534)),
    ],
)
def test_a_share_has_the_wilson_interval(
    right: int, count: int, bounds: tuple[float, float]
) -> None:
    share = Share(right, count)
    assert share.bounds == pytest.approx(bounds, abs=1e-4)
    assert share.to_dict()["mean"] == right / count
    for bound in share.bounds:
        # The bounds are where the true share would be just as far off as the quantile allows.
        spread = (bound * (1 - bound) / count) ** 0.5
        assert abs(share.mean - bound) == pytest.approx(1.959964 * spread, abs=1e-6)
