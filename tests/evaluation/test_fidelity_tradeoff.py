"""Quality against cost: points of rows whose numbers are known, and the best of points."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.evaluation.fidelity_tradeoff import Point, frontier, points
from kvfold.evaluation.fidelity_tradeoff_chart import draw_tradeoff
from kvfold.evaluation.statistics import Interval, Share
from tests.evaluation.test_fidelity_costs import TIMED, middle, report, timed
from tests.evaluation.test_fidelity_report import ROWS, row


def find(found: list[Point], method: str) -> Point:
    (point,) = [each for each in found if each.method == method]
    return point


GRADED = {"is_right": None, "fault": None}
"""Of an answer that a score alone judges."""


def test_points_have_distance_score_bytes_and_speed() -> None:
    point = find(points(ROWS, seed=0), "distill")
    assert point.kl is not None
    assert point.kl.mean == pytest.approx((0.6 + 1.2) / 7)
    assert point.score == Interval(0.25, *Share(1, 4).bounds, 4)
    assert (point.bytes_fast, point.speed) == (0.3, None)
    (full, other) = points(TIMED[:6], seed=0)
    assert middle(full.speed) == (1, 1, 1)
    assert middle(other.speed) == (2, 1.5, 2.5)
    assert (full.score, other.score) == (None, None)


def test_graded_scores_count_beside_right_answers() -> None:
    graded = [
        row(method, "longbench/samsum", index, 0.1, score=score, **GRADED)
        for method, scores in (("full", (0.5, 1.0)), ("h2o", (0.25, 0.75)))
        for index, score in enumerate(scores)
    ]
    right = [row(method, "niah", 0, 0.1) for method in ("full", "h2o")]
    alone, both = (find(points(rows, seed=0), "h2o").score for rows in (graded, graded + right))
    assert alone == Interval(0.5, 0.25, 0.75, 2)
    assert both is not None
    assert (both.mean, both.count) == (pytest.approx(2 / 3), 3)
    assert 0.25 <= both.low < both.mean < both.high <= 1
    whole = [row("full", "longbench/samsum", 0, 0.0, score=1.0, **GRADED)]
    assert find(points(whole, seed=0), "full").score == Interval(1.0, *Share(1, 1).bounds, 1)


def test_a_picture_has_graded_scores() -> None:
    def drawn(score: float) -> bytes:
        changed = tuple(
            replace(each, score=score if each.method == "h2o" else 1.0, **GRADED)
            for each in ROWS
            if each.kind == "task"
        )
        return draw_tradeoff(report(changed).fidelity)

    assert drawn(0.3) != drawn(0.6)


def test_batches_of_other_sizes_are_not_compared() -> None:
    alone = timed(row("h2o", "prose", 0, 0.1), 15, rows=1)
    assert find(points([TIMED[0], alone], seed=0), "h2o").speed is None


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12))
def test_the_frontier_is_what_nothing_beats(places: list[tuple[int, int]]) -> None:
    best = frontier([cost for cost, _ in places], [gain for _, gain in places])

    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    unbeaten = {own for own in places if not any(beats(each, own) for each in places)}
    assert [places[place] for place in best] == sorted(unbeaten)


def test_pictures_differ_where_rows_do() -> None:
    whole, texts = draw_tradeoff(report(ROWS).fidelity), draw_tradeoff(report(TIMED[:6]).fidelity)
    slower = (*TIMED[:3], *(timed(each, 3) for each in TIMED[3:6]))
    assert len({whole, texts, draw_tradeoff(report(slower).fidelity)}) == 3
