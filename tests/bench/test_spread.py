"""Medians, ranges and ratios of a few samples."""

from __future__ import annotations

import pytest

from kvfold.bench.spread import Spread, pairwise


def test_spread_tells_the_middle_and_the_range() -> None:
    spread = Spread((3.0, 1.0, 2.0, 10.0))
    assert spread.to_dict() == {
        "median": 2.5,
        "min": 1.0,
        "max": 10.0,
        "samples": [3.0, 1.0, 2.0, 10.0],
    }
    assert f"{spread:.1f}" == "2.5 (1.0 to 10.0)"
    assert f"{Spread((2.0,)):.2f}" == "2.00"
    assert spread.times(1000).samples == (3000.0, 1000.0, 2000.0, 10000.0)


def test_ratios_are_taken_within_a_round() -> None:
    # By medians b is as fast as a; in every round it is not.
    ratios = pairwise({"a": [1.0, 2.0, 4.0], "b": [2.0, 1.0, 2.0], "c": [1.0, 1.0, 1.0]})
    assert [(ratio.subject, ratio.over) for ratio in ratios] == [("b", "a"), ("c", "a"), ("c", "b")]
    assert ratios[0].to_dict() == {
        "subject": "b",
        "over": "a",
        "median": 0.5,
        "min": 0.5,
        "max": 2.0,
        "samples": [2.0, 0.5, 0.5],
    }


def test_subjects_need_as_many_rounds() -> None:
    with pytest.raises(ValueError, match="argument 2 is longer"):
        pairwise({"a": [1.0, 2.0], "b": [1.0]})
