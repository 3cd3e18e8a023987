"""Intervals of means."""

from __future__ import annotations

import pytest
import torch

from kvfold.evaluation.statistics import Interval


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
