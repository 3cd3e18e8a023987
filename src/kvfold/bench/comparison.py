"""Subjects measured side by side, and what follows from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from kvfold.bench.request import Measurement
from kvfold.bench.settings import DYNAMIC, SEED, Settings
from kvfold.bench.spread import Ratio, Spread, pairwise
from kvfold.environment import environment

FORMAT = 1
"""Version of the result's layout."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One subject's measurements, in the order of the rounds."""

    subject: str
    """`dynamic` or a method."""
    measurements: tuple[Measurement, ...]
    """At least one."""

    @property
    def tokens_per_second(self) -> Spread:
        """Throughput over the rounds."""
        return Spread(tuple(each.tokens_per_second for each in self.measurements))

    @property
    def seconds(self) -> Spread:
        """Seconds a decode step, or to the first token."""
        return Spread(tuple(sum(e.seconds) / len(e.seconds) for e in self.measurements))

    @property
    def rss_peak(self) -> int | None:
        """Highest peak of any round."""
        peaks = [each.rss_peak for each in self.measurements if each.rss_peak is not None]
        return max(peaks, default=None)

    @property
    def last(self) -> Measurement:
        """The last round's, for what does not change from round to round."""
        return self.measurements[-1]

    def to_dict(self) -> dict[str, object]:
        """The outcome as plain data, with every raw measurement."""
        return {
            "subject": self.subject,
            "tokens_per_second": self.tokens_per_second.to_dict(),
            "seconds": self.seconds.to_dict(),
            "rss_peak": self.rss_peak,
            "cache_bytes": self.last.cache_bytes,
            "full_bytes": self.last.full_bytes,
            "slow_bytes": self.last.slow_bytes,
            "moved_bytes": self.last.moved_bytes,
            "parts": self.last.parts,
            "measurements": [asdict(each) for each in self.measurements],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """All subjects at one context and batch."""

    context: int
    """Tokens."""
    batch: int
    """Rows."""
    outcomes: tuple[Outcome, ...]
    """In the order of measurement."""

    @property
    def title(self) -> str:
        """What is compared, in a few words."""
        return f"context {self.context}, batch {self.batch}"

    def find(self, subject: str) -> Outcome | None:
        """The outcome of a subject; None if it was not measured."""
        return next((each for each in self.outcomes if each.subject == subject), None)

    def ratios(self) -> list[Ratio]:
        """Throughput of every subject over each one before it, round by round."""
        return pairwise({each.subject: each.tokens_per_second.samples for each in self.outcomes})

    def to_dict(self) -> dict[str, object]:
        """The comparison as plain data."""
        return {
            "context": self.context,
            "batch": self.batch,
            "outcomes": [each.to_dict() for each in self.outcomes],
            "ratios": [each.to_dict() for each in self.ratios()],
        }


class Finding(Protocol):
    """One thing that the measurements say; its text is a sentence."""

    def to_dict(self) -> dict[str, object]:
        """The finding as plain data, its `kind` among it."""
        ...


@dataclass(frozen=True, slots=True)
class BenchResult:
    """All that one run of the bench found."""

    kind: str
    """`decode` or `prefill`."""
    settings: Settings
    """What was asked for."""
    comparisons: tuple[Comparison, ...]
    """One for each context and batch."""
    findings: Sequence[Finding]
    """What they say."""
    notes: tuple[str, ...]
    """What a reader has to know to judge them."""
    environment: dict[str, object] = field(default_factory=environment)
    """Versions, commit and machine."""

    def to_dict(self) -> dict[str, object]:
        """The result as plain data."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "command": self.settings.command(self.kind),
            "settings": self.settings.to_dict(),
            "seed": SEED,
            "environment": self.environment,
            "notes": list(self.notes),
            "comparisons": [each.to_dict() for each in self.comparisons],
            "findings": [each.to_dict() | {"text": str(each)} for each in self.findings],
        }


def common_notes(settings: Settings) -> tuple[str, ...]:
    """Notes on the subjects, whatever is measured."""
    notes = ["each measurement is a process of its own; ratios are of neighbours in one round"]
    if settings.device == "cpu" and "OMP_WAIT_POLICY" not in os.environ:
        notes.append(
            "threads wait as torch lets them, which a machine with other work slows down by far: "
            "set OMP_WAIT_POLICY=PASSIVE there"
        )
    if DYNAMIC in settings.subjects:
        notes.append("dynamic is transformers' DynamicCache on transformers' own attention")
        if settings.device == "cpu" and settings.dtype not in ("float32", "fp32"):
            notes.append(
                "in half precision the kernel that transformers' own attention takes for single "
                "queries on a CPU is several times slower than it need be: judge methods by their "
                "ratio over full, not over dynamic"
            )
    return tuple(notes)
