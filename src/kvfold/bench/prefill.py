"""Time to the first token and peak memory of a prompt, in chunks, for every subject."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import starmap

from kvfold.artifacts import MIB
from kvfold.bench.checks import ModelFacts, check
from kvfold.bench.comparison import BenchResult, Comparison, Finding, Outcome, common_notes
from kvfold.bench.processes import Runner, measured, run_process
from kvfold.bench.request import Measurement
from kvfold.bench.rounds import alternate
from kvfold.bench.settings import PrefillSettings
from kvfold.bench.spread import Spread, divide
from kvfold.bench.subjects import evicts, needs_statistics, request_for
from kvfold.models.home import Progress

TOLERANCE = 1.15
"""How far peak memory may stand above the sum of its parts."""


@dataclass(frozen=True, slots=True)
class MemoryCheck:
    """Peak resident memory of an evicting prefill against its parts."""

    subject: str
    """The method."""
    context: int
    """Tokens of the prompt."""
    rss_peak: int
    """Highest peak of the whole process in any round."""
    rss_model: int
    """The part that stands with the model loaded and used once, interpreter and libraries too."""
    budget_bytes: int
    """What the cache holds at the end."""
    chunk_bytes: int
    """Keys and values of one chunk over all layers."""

    @property
    def bound(self) -> float:
        """Model, budget and one chunk, with the tolerance."""
        return TOLERANCE * (self.rss_model + self.budget_bytes + self.chunk_bytes)

    @property
    def holds(self) -> bool:
        """Whether the peak stays within the bound."""
        return self.rss_peak <= self.bound

    def to_dict(self) -> dict[str, object]:
        """The finding as plain data."""
        more = {"tolerance": TOLERANCE, "bound": self.bound, "holds": self.holds}
        return {"kind": "memory", **asdict(self), **more}

    def __str__(self) -> str:
        """One sentence."""
        parts = (self.rss_model, self.budget_bytes, self.chunk_bytes)
        model, budget, chunk = (round(part / MIB) for part in parts)
        return (
            f"{self.subject}, context {self.context}: peak {self.rss_peak / MIB:.0f} MiB is "
            f"{'within' if self.holds else 'ABOVE'} {self.bound / MIB:.0f} MiB = "
            f"{TOLERANCE} x (process with model {model} + budget {budget} + one chunk {chunk})"
        )


@dataclass(frozen=True, slots=True)
class StatisticsCost:
    """What it costs to look at attention: a method that does, over one that does not."""

    subject: str
    """A method that needs attention statistics."""
    over: str
    """A method that evicts as much without them."""
    context: int
    """Tokens of the prompt."""
    extra: Spread
    """Additional time to the first token, as a share."""

    def to_dict(self) -> dict[str, object]:
        """The finding as plain data."""
        names = {"subject": self.subject, "over": self.over, "context": self.context}
        return {"kind": "statistics", **names, "extra": self.extra.to_dict()}

    def __str__(self) -> str:
        """One sentence."""
        return (
            f"{self.subject}, context {self.context}: attention statistics cost "
            f"{self.extra:+.1%} time to the first token, against {self.over}"
        )


def bench_prefill(
    settings: PrefillSettings, *, progress: Progress, runner: Runner = run_process
) -> BenchResult:
    """Measure time to the first token, peak memory and cache bytes side by side.

    Args:
        settings: What to measure.
        progress: Receives a line before each measurement.
        runner: Does one request.

    Returns:
        One comparison for each context.

    Raises:
        ConfigError: For settings that cannot be measured, before anything starts.
        KVFoldError: When a measuring process fails.
    """
    facts = check(settings, progress)
    comparisons = [
        Comparison(context, 1, _time_all(settings, context, progress, runner))
        for context in settings.contexts
    ]
    findings: list[Finding] = []
    for each in comparisons:
        findings += memory_checks(each, settings, facts)
        findings += statistics_costs(each)
    note = f"the prompt goes in chunks of {settings.chunk_size} tokens, evicting after each"
    return BenchResult(
        kind="prefill",
        settings=settings,
        comparisons=tuple(comparisons),
        findings=findings,
        notes=(*common_notes(settings), note),
    )


def _time_all(
    settings: PrefillSettings, context: int, progress: Progress, runner: Runner
) -> tuple[Outcome, ...]:
    def measure(subject: str, number: int) -> Measurement:
        progress(f"context {context}: prefill with {subject}, round {number} of {settings.rounds}")
        request = request_for(settings, "prefill", subject, context)
        return measured(runner, replace(request, chunk_size=settings.chunk_size))

    return tuple(starmap(Outcome, alternate(settings.subjects, settings.rounds, measure).items()))


def memory_checks(
    comparison: Comparison, settings: PrefillSettings, facts: ModelFacts
) -> list[MemoryCheck]:
    """Check the peak of every method that has a budget, where the system tells it."""
    chunk = min(settings.chunk_size, comparison.context)
    found = []
    for outcome in comparison.outcomes:
        peak, base = outcome.rss_peak, outcome.last.rss_model
        if peak is None or base is None or not evicts(outcome.subject):
            continue
        found.append(
            MemoryCheck(
                subject=outcome.subject,
                context=comparison.context,
                rss_peak=peak,
                rss_model=base,
                budget_bytes=outcome.last.cache_bytes,
                chunk_bytes=facts.kv_bytes(chunk),
            )
        )
    return found


def statistics_costs(comparison: Comparison) -> list[StatisticsCost]:
    """Compare every method with statistics with the first that evicts without."""
    evicting = [each for each in comparison.outcomes if evicts(each.subject)]
    plain: Sequence[Outcome] = [e for e in evicting if not needs_statistics(e.subject)]
    if not plain:
        return []
    base = plain[0]
    return [
        StatisticsCost(each.subject, base.subject, comparison.context, _extra(each, base))
        for each in evicting
        if needs_statistics(each.subject)
    ]


def _extra(outcome: Outcome, base: Outcome) -> Spread:
    ratio = divide(outcome.seconds.samples, base.seconds.samples)
    return Spread(tuple(sample - 1 for sample in ratio.samples))
