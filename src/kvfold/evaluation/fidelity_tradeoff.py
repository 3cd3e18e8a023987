"""Quality against what it costs: one point a method and budget, and which of them are best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvfold.bench.spread import Spread
from kvfold.evaluation.fidelity_rows import Row, by_run
from kvfold.evaluation.fidelity_settings import FULL
from kvfold.evaluation.statistics import Interval, Share

_SampleId = tuple[str, int, int]
"""Set, length and place in the set."""


@dataclass(frozen=True, slots=True)
class Point:
    """One method at one budget over all samples of an evaluation."""

    method: str
    """Its label."""
    budget: str
    """What it may keep."""
    kl: Interval | None
    """`KL(full || method)` in nats; None where no answer has a token."""
    score: Interval | None
    """Of tasks: 1 for a right answer and 0 for a wrong one, or the benchmark's own score, with a
    bootstrap interval, or Wilson's where no score is between 0 and 1; None without tasks."""
    bytes_fast: float
    """Held after the prompt on the tier that attention reads, as a share of a full cache's keys and
    values."""
    speed: Spread | None
    """Tokens a second as multiples of the full cache's, sample by sample and by the way; None where
    rows have none."""


def points(rows: Sequence[Row], *, seed: int) -> list[Point]:
    """Every method at every budget.

    Args:
        rows: Of an evaluation, those of the full cache among them.
        seed: Of the bootstrap.
    """
    full = {_sample(row): row for row in rows if row.method == FULL}
    return [_point(run, own, full, seed) for run, own in by_run(rows).items()]


def frontier(costs: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Which points no other beats: each has more gain than all that cost as little or less.

    Args:
        costs: Of each point; less is better.
        gains: Of each point; more is better.

    Returns:
        Places of the points, from the cheapest on. Of points that are alike the first is taken.
    """
    found: list[int] = []
    for place in sorted(range(len(costs)), key=lambda place: (costs[place], -gains[place])):
        if not found or gains[place] > gains[found[-1]]:
            found.append(place)
    return found


def _point(
    run: tuple[str, str], rows: Sequence[Row], full: Mapping[_SampleId, Row], seed: int
) -> Point:
    distances = [row.kl for row in rows if row.kl is not None]
    scores = [row.points for row in rows if row.points is not None]
    speeds = list(_speeds(rows, full))
    method, budget = run
    return Point(
        method=method,
        budget=budget,
        kl=Interval.of(distances, seed=seed) if distances else None,
        score=_score(scores, seed) if scores else None,
        bytes_fast=sum(row.bytes_fast for row in rows) / sum(row.bytes_full for row in rows),
        speed=Spread(tuple(speeds)) if speeds else None,
    )


def _score(scores: Sequence[float], seed: int) -> Interval:
    if not set(scores) <= {0, 1}:
        return Interval.of(scores, seed=seed)
    low, high = Share(round(sum(scores)), len(scores)).bounds
    return Interval(fmean(scores), low, high, len(scores))


def _speeds(rows: Iterable[Row], full: Mapping[_SampleId, Row]) -> Iterable[float]:
    """Ratios to the full cache in batches of the same size."""
    for row in rows:
        other = full[_sample(row)]
        if row.tokens_per_second and other.tokens_per_second and row.batch_rows == other.batch_rows:
            yield row.tokens_per_second / other.tokens_per_second


def _sample(row: Row) -> _SampleId:
    return row.set, row.length, row.index
