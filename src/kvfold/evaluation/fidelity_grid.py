"""Answers by length: how many are right with each method and budget, and in how many bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvfold.evaluation.fidelity_rows import Row, by_run
from kvfold.evaluation.fidelity_settings import FULL
from kvfold.evaluation.statistics import Share


@dataclass(frozen=True, slots=True)
class Cell:
    """One method at one budget over the tasks of one set and length."""

    set: str
    """Name of the set."""
    length: int | None
    """Tokens that its prompts were made for; None for all lengths together."""
    method: str
    """Its label."""
    budget: str
    """What it may keep."""
    answers: Share
    """Those that are right."""
    share_of_full: float | None
    """Right answers as a share of the full cache's; None where that has none."""
    found: float | None
    """Share of what is expected that answers have, where all of several is wanted."""
    bytes_fast: float
    """Held after the prompt on the tier that attention reads, as a share of a full cache's keys and
    values."""
    bytes_slow: float
    """Held on the other tier, as a share of the same."""

    def to_dict(self) -> dict[str, object]:
        """The cell as plain data."""
        return {
            "set": self.set,
            "length": self.length,
            "method": self.method,
            "budget": self.budget,
            "answers": self.answers.to_dict(),
            "share_of_full": self.share_of_full,
            "found": self.found,
            "bytes_fast": self.bytes_fast,
            "bytes_slow": self.bytes_slow,
        }


def grid(rows: Sequence[Row]) -> list[Cell]:
    """Tasks by set and length, and all lengths together where there are several.

    Args:
        rows: Of an evaluation, those of the full cache among them.
    """
    return [
        _cell(name, length, run, own, [row for row in inside if row.method == FULL])
        for name, length, inside in _groups([row for row in rows if row.is_right is not None])
        for run, own in by_run(inside).items()
    ]


def share_right(rows: Iterable[Row]) -> Share:
    """How many answers are right.

    Args:
        rows: Of tasks, one at least.
    """
    right = [bool(row.is_right) for row in rows]
    return Share(sum(right), len(right))


def _groups(rows: Sequence[Row]) -> Iterator[tuple[str, int | None, list[Row]]]:
    for name in dict.fromkeys(row.set for row in rows):
        own = [row for row in rows if row.set == name]
        lengths = list(dict.fromkeys(row.length for row in own))
        for length in lengths:
            yield name, length, [row for row in own if row.length == length]
        if len(lengths) > 1:
            yield name, None, own


def _cell(
    name: str,
    length: int | None,
    run: tuple[str, str],
    rows: Sequence[Row],
    full: Sequence[Row],
) -> Cell:
    answers, best = share_right(rows), share_right(full).mean
    found = [row.found for row in rows if row.found is not None]
    whole, fast = sum(row.bytes_full for row in rows), sum(row.bytes_fast for row in rows)
    method, budget = run
    return Cell(
        set=name,
        length=length,
        method=method,
        budget=budget,
        answers=answers,
        share_of_full=answers.mean / best if best else None,
        found=fmean(found) if found else None,
        bytes_fast=fast / whole,
        bytes_slow=(sum(row.bytes_held for row in rows) - fast) / whole,
    )
