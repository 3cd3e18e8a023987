"""Time and memory by the way: what a method took while it was evaluated, which is no benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from kvfold.bench.spread import Spread
from kvfold.evaluation.fidelity_rows import Row, by_run


@dataclass(frozen=True, slots=True)
class Cost:
    """One method at one budget over the samples of one set and length.

    Samples that were run together share their measurements, and each counts.
    """

    set: str
    """Name of the set."""
    length: int
    """Tokens that its prompts were made for."""
    method: str
    """Its label."""
    budget: str
    """What it may keep."""
    batch_rows: Spread | None
    """Samples that were run together."""
    first_token_seconds: Spread | None
    """To read the prompts of a batch, to fill the cache and to read questions that come later."""
    tokens_per_second: Spread | None
    """Of all rows of a batch together; None where none was decoded."""
    bytes_peak: Spread | None
    """Most bytes that the cache held after a forward, a row."""

    def to_dict(self) -> dict[str, object]:
        """The costs as plain data."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value.to_dict() if isinstance(value, Spread) else value
            for name, value in values.items()
        }


def costs(rows: Iterable[Row]) -> list[Cost]:
    """What was taken, by set, length, method and budget.

    Args:
        rows: Of an evaluation; old ones, without measurements, are left out.
    """
    found: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        if row.batch_rows is not None:
            found.setdefault((row.set, row.length), []).append(row)
    return [_cost(own) for together in found.values() for own in by_run(together).values()]


def _cost(rows: Sequence[Row]) -> Cost:
    """Of rows of one set, length, method and budget."""
    return Cost(
        set=rows[0].set,
        length=rows[0].length,
        method=rows[0].method,
        budget=rows[0].budget,
        batch_rows=_spread([row.batch_rows for row in rows]),
        first_token_seconds=_spread([row.first_token_seconds for row in rows]),
        tokens_per_second=_spread([row.tokens_per_second for row in rows]),
        bytes_peak=_spread([row.bytes_peak for row in rows]),
    )


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = tuple(value for value in values if value is not None)
    return Spread(known) if known else None
