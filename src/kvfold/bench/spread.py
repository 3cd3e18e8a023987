"""A few repetitions of one measurement, and how two subjects relate round by round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """Samples of one quantity, in the order of the rounds."""

    samples: tuple[float, ...]
    """At least one."""

    @property
    def median(self) -> float:
        """The middle sample."""
        return median(self.samples)

    @property
    def lowest(self) -> float:
        """The smallest sample."""
        return min(self.samples)

    @property
    def highest(self) -> float:
        """The largest sample."""
        return max(self.samples)

    def times(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(tuple(factor * sample for sample in self.samples))

    def to_dict(self) -> dict[str, object]:
        """Median, min, max and all samples."""
        return {
            "median": self.median,
            "min": self.lowest,
            "max": self.highest,
            "samples": list(self.samples),
        }

    def __format__(self, spec: str) -> str:
        """Median and range, each number by the format given."""
        if len(self.samples) == 1:
            return format(self.median, spec)
        numbers = (self.median, self.lowest, self.highest)
        return "{} ({} to {})".format(*(format(number, spec) for number in numbers))


@dataclass(frozen=True, slots=True)
class Ratio:
    """One subject against another: a ratio a round, of two neighbours in time."""

    subject: str
    """Numerator."""
    over: str
    """Denominator."""
    spread: Spread
    """The ratios."""

    def to_dict(self) -> dict[str, object]:
        """The ratio as plain data."""
        return {"subject": self.subject, "over": self.over, **self.spread.to_dict()}


def pairwise(samples: Mapping[str, Sequence[float]]) -> list[Ratio]:
    """The ratio of every subject over each one before it.

    Args:
        samples: By subject, one number a round, none of them zero.

    Returns:
        For subjects A, B, C: B over A, C over A, C over B.
    """
    return [
        Ratio(after, before, divide(samples[after], samples[before]))
        for before, after in combinations(samples, 2)
    ]


def divide(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Ratios of two subjects, round by round."""
    return Spread(tuple(a / b for a, b in zip(above, below, strict=True)))
