"""Decode throughput of every subject, from a prefilled context.

The context is prefilled once for each method, with one row, and stored. Every process loads it,
repeats the row, and times steps that are fed the text's next tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from pathlib import Path

from kvfold.bench.checks import ModelFacts, check
from kvfold.bench.comparison import BenchResult, Comparison, Finding, Outcome, common_notes
from kvfold.bench.processes import Runner, measured, run_process, scratch_folder
from kvfold.bench.request import Measurement, Request
from kvfold.bench.rounds import alternate
from kvfold.bench.settings import DYNAMIC, DecodeSettings
from kvfold.bench.spread import Spread, divide
from kvfold.bench.subjects import request_for
from kvfold.models.home import Progress

_FULL = "full"


@dataclass(frozen=True, slots=True)
class Payoff:
    """Whether a method decodes faster than the full cache at one context and batch."""

    subject: str
    """The method."""
    context: int
    """Tokens."""
    batch: int
    """Rows."""
    ratio: float
    """Median throughput over that of `full`."""
    verdict: str
    """`faster` or `slower` in every round of several, else `no clear difference`."""

    def to_dict(self) -> dict[str, object]:
        """The finding as plain data."""
        return {"kind": "payoff", **asdict(self)}

    def __str__(self) -> str:
        """One sentence."""
        where = f"at context {self.context}, batch {self.batch}"
        if self.verdict == "faster":
            return f"{self.subject} pays {where}: {self.ratio:.2f} times full"
        return f"{self.subject} does not pay {where}: {self.verdict}, {self.ratio:.2f} times full"


def bench_decode(
    settings: DecodeSettings, *, progress: Progress, runner: Runner = run_process
) -> BenchResult:
    """Measure decode throughput, peak memory and cache bytes side by side.

    Args:
        settings: What to measure.
        progress: Receives a line before each measurement.
        runner: Does one request.

    Returns:
        One comparison for each context and batch.

    Raises:
        ConfigError: For settings that cannot be measured, before anything starts.
        KVFoldError: When a measuring process fails.
    """
    facts = check(settings, progress)
    comparisons: list[Comparison] = []
    for context in settings.contexts:
        with scratch_folder(_stored_bytes(settings, facts, context)) as folder:
            requests = _store_all(settings, context, folder, progress, runner)
            for batch in settings.batches:
                outcomes = _time_all(settings, requests, batch, progress, runner)
                comparisons.append(Comparison(context, batch, outcomes))
    notes = [
        "the rows of a batch repeat one prefilled row",
        "the last timed step of a full cache attends to the whole context",
    ]
    if any(settings.prompt(context) < settings.stored(context) for context in settings.contexts):
        notes.append(
            f"beyond {settings.read} tokens a context repeats the queries, keys and values of those"
        )
    return BenchResult(
        kind="decode",
        settings=settings,
        comparisons=tuple(comparisons),
        findings=payoffs(comparisons),
        notes=(*common_notes(settings), *notes),
    )


def _stored_bytes(settings: DecodeSettings, facts: ModelFacts, context: int) -> int:
    """An upper bound on the files: positions and statistics take less than half of the rest."""
    return len(settings.subjects) * facts.kv_bytes(settings.stored(context)) * 3 // 2


def _store_all(
    settings: DecodeSettings, context: int, folder: Path, progress: Progress, runner: Runner
) -> dict[str, Request]:
    """Prefill a context for every subject; `dynamic` takes what `full` has stored.

    Returns:
        What to ask for to time each subject, the batch left open.
    """
    methods = dict.fromkeys(_FULL if s == DYNAMIC else s for s in settings.subjects)
    files = {method: str(folder / f"{method}.safetensors") for method in methods}
    for method, file in files.items():
        progress(f"context {context}: prefilling for {method}")
        request = request_for(settings, "store", method, settings.stored(context))
        runner(replace(request, file=file, read=settings.prompt(context)))
    return {
        subject: replace(
            request_for(settings, "decode", subject, settings.stored(context)),
            read=settings.prompt(context),
            warmup=settings.warmup,
            steps=settings.steps,
            file=files[_FULL if subject == DYNAMIC else subject],
        )
        for subject in settings.subjects
    }


def _time_all(
    settings: DecodeSettings,
    requests: Mapping[str, Request],
    batch: int,
    progress: Progress,
    runner: Runner,
) -> tuple[Outcome, ...]:
    def measure(subject: str, number: int) -> Measurement:
        request = replace(requests[subject], batch=batch)
        tokens = request.context + request.warmup + request.steps
        progress(
            f"context {tokens}, batch {batch}: decoding with {subject}, "
            f"round {number} of {settings.rounds}"
        )
        return measured(runner, request)

    return tuple(starmap(Outcome, alternate(settings.subjects, settings.rounds, measure).items()))


def payoffs(comparisons: list[Comparison]) -> list[Finding]:
    """Where each method pays, and where it does not; nothing without method full."""
    found: list[Finding] = []
    for each in comparisons:
        full = each.find(_FULL)
        if full is None:
            continue
        for outcome in each.outcomes:
            if outcome.subject not in (_FULL, DYNAMIC):
                ratio = divide(outcome.tokens_per_second.samples, full.tokens_per_second.samples)
                verdict = _verdict(ratio)
                where = (each.context, each.batch)
                found.append(Payoff(outcome.subject, *where, ratio.median, verdict))
    return found


def _verdict(ratio: Spread) -> str:
    if len(ratio.samples) < 2:
        return "one round alone"
    if ratio.lowest > 1:
        return "faster"
    return "slower" if ratio.highest < 1 else "no clear difference"
