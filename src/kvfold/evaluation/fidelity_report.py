"""What an evaluation of fidelity comes to: means with intervals, and paired differences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from kvfold.evaluation.answers import FAULTS
from kvfold.evaluation.fidelity_costs import Cost, costs
from kvfold.evaluation.fidelity_found import Fidelity
from kvfold.evaluation.fidelity_grid import Cell, grid
from kvfold.evaluation.fidelity_rows import Row, by_run
from kvfold.evaluation.fidelity_settings import FULL
from kvfold.evaluation.statistics import Interval

FORMAT = 1
"""Version of the result's layout."""
ALL = "all"
"""The group of every sample."""

_SampleId = tuple[str, int, int]
"""Set, length and place in the set."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One method at one budget over a group of samples."""

    group: str
    """A set, a set at a length, `text`, `task`, or `all`."""
    method: str
    """Its label."""
    budget: str
    """What it may keep."""
    samples: int
    """Their number."""
    cut: int
    """Those whose prompt was too long and lost its middle."""
    kl: Interval | None
    """`KL(full || method)` in nats: mean over samples; None where no answer has a token."""
    agreement: float | None
    """Share of tokens after which both find the same token likeliest, mean over samples."""
    perplexity: Interval | None
    """Of texts after their first forced token: exp of the mean negative log-likelihood over
    samples; None without texts, and where a row does not have it."""
    score: float | None
    """Share of tasks answered right, or the mean of the benchmark's score; None without tasks."""
    share_of_full: float | None
    """The score as a share of the full cache's; None where that is 0."""
    faults: dict[str, float] | None
    """Share of tasks with each fault."""
    lost: dict[str, float] | None
    """The same among the tasks that the full cache answers right; None where there are none."""
    answer_length: float | None
    """Tokens of the answers, as a multiple of the full cache's."""
    tokens_kept: float
    """After the prompt, mean over samples."""
    bytes_share: float
    """Bytes held after the prompt, as a share of a full cache's keys and values."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The baseline against another method at one budget, sample by sample."""

    group: str
    """A set, a set at a length, `text`, `task`, or `all`."""
    budget: str
    """What both may keep."""
    method: str
    """The baseline."""
    other: str
    """The other."""
    kl: Interval
    """The baseline's KL less the other's: below 0 where the baseline is nearer to full."""

    @property
    def verdict(self) -> str:
        """What the interval says; nothing where there is one sample, which has none."""
        if self.kl.count < 2:
            return "one sample alone"
        if self.kl.high < 0:
            return "nearer to full"
        return "further from full" if self.kl.low > 0 else "no clear difference"

    def to_dict(self) -> dict[str, object]:
        """The difference as plain data."""
        return {**asdict(self), "verdict": self.verdict}


def groups(rows: Iterable[Row]) -> dict[str, Callable[[Row], bool]]:
    """Groups of samples by name: every set, also by length if there are several, kind, and all."""
    rows = list(rows)
    sets, kinds = {row.set: None for row in rows}, {row.kind: None for row in rows}
    lengths = {row.length: None for row in rows}
    found = {name: _in_set(name) for name in sets}
    if len(lengths) > 1:
        pairs = [(name, length) for name in sets for length in lengths]
        found |= {f"{name} at {length}": _in_set(name, length) for name, length in pairs}
    return {**found, **{kind: _of_kind(kind) for kind in kinds}, ALL: lambda _: True}


def summarize(rows: Sequence[Row], *, seed: int) -> list[Summary]:
    """The means of every method at every budget, by group.

    Args:
        rows: Of an evaluation, those of the full cache among them.
        seed: Of the bootstrap.
    """
    found = []
    for group, belongs in groups(rows).items():
        inside = [row for row in rows if belongs(row)]
        full = {_sample(row): row for row in inside if row.method == FULL}
        for (method, budget), own in by_run(inside).items():
            found.append(_summary(group, method, budget, own, full, seed))
    return found


def differences(rows: Sequence[Row], baseline: str, *, seed: int) -> list[Difference]:
    """The baseline against every other method at the same budget, by group.

    Args:
        rows: Of an evaluation.
        baseline: Label of a method.
        seed: Of the bootstrap.
    """
    found = []
    for group, belongs in groups(rows).items():
        runs = by_run([row for row in rows if belongs(row)])
        for (method, budget), own in runs.items():
            if method == baseline or (baseline, budget) not in runs:
                continue
            paired = list(_paired(runs[baseline, budget], own))
            if paired:
                interval = Interval.of(paired, seed=seed)
                found.append(Difference(group, budget, baseline, method, interval))
    return found


@dataclass(frozen=True, slots=True)
class Report:
    """An evaluation with its statistics."""

    fidelity: Fidelity
    """What was found."""
    summaries: tuple[Summary, ...]
    """By group, method and budget."""
    differences: tuple[Difference, ...]
    """By group, budget and method; empty without a baseline."""
    cells: tuple[Cell, ...]
    """Tasks by set, length, method and budget."""
    costs: tuple[Cost, ...]
    """Time and memory by the way, by set, length, method and budget."""

    def to_dict(self) -> dict[str, object]:
        """The report as plain data."""
        return {
            "format": FORMAT,
            "command": self.fidelity.command,
            "subject": asdict(self.fidelity.subject),
            "settings": self.fidelity.settings.to_dict(),
            "environment": self.fidelity.environment,
            "summaries": [asdict(each) for each in self.summaries],
            "differences": [each.to_dict() for each in self.differences],
            "grid": [each.to_dict() for each in self.cells],
            "costs": [each.to_dict() for each in self.costs],
            "process_peak": self.fidelity.process_peak,
            "rows": [row.to_dict() for row in self.fidelity.rows],
        }


def report_of(fidelity: Fidelity) -> Report:
    """Work out the statistics."""
    rows, settings = fidelity.rows, fidelity.settings
    baseline = settings.compared_with
    compared = [] if baseline is None else differences(rows, baseline, seed=settings.seed)
    summaries = summarize(rows, seed=settings.seed)
    return Report(
        fidelity, tuple(summaries), tuple(compared), tuple(grid(rows)), tuple(costs(rows))
    )


def _summary(
    group: str,
    method: str,
    budget: str,
    rows: Sequence[Row],
    full: dict[_SampleId, Row],
    seed: int,
) -> Summary:
    distances = [row.kl for row in rows if row.kl is not None]
    nats = [row.nll for row in rows if row.nll is not None]
    is_whole = len(nats) == sum(row.kind == "text" for row in rows) > 0
    answered = [row for row in rows if row.points is not None]
    references = [full[_sample(row)] for row in answered]
    score, best = (
        _mean(row.points for row in each if row.points is not None)
        for each in (answered, references)
    )
    tasks = [row for row in answered if row.is_right is not None]
    known = [row for row in tasks if full[_sample(row)].is_right]
    return Summary(
        group=group,
        method=method,
        budget=budget,
        samples=len(rows),
        cut=sum(row.left_out > 0 for row in rows),
        kl=Interval.of(distances, seed=seed) if distances else None,
        agreement=_mean(row.agreement for row in rows if row.agreement is not None),
        perplexity=Interval.of(nats, seed=seed).exp() if is_whole else None,
        score=score,
        share_of_full=score / best if score is not None and best else None,
        faults=_faults(tasks),
        lost=_faults(known),
        answer_length=_ratio(answered, references),
        tokens_kept=fmean(row.tokens_kept for row in rows),
        bytes_share=sum(row.bytes_held for row in rows) / sum(row.bytes_full for row in rows),
    )


def _paired(own: Iterable[Row], others: Iterable[Row]) -> Iterator[float]:
    """Differences in KL, sample by sample."""
    theirs = {_sample(row): row.kl for row in others}
    for row in own:
        other = theirs.get(_sample(row))
        if row.kl is not None and other is not None:
            yield row.kl - other


def _faults(tasks: Sequence[Row]) -> dict[str, float] | None:
    if not tasks:
        return None
    return {fault: fmean(row.fault == fault for row in tasks) for fault in FAULTS}


def _ratio(tasks: Iterable[Row], references: Iterable[Row]) -> float | None:
    own = sum(row.answer_tokens or 0 for row in tasks)
    full = sum(row.answer_tokens or 0 for row in references)
    return own / full if full else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def _sample(row: Row) -> _SampleId:
    return row.set, row.length, row.index


def _in_set(name: str, length: int | None = None) -> Callable[[Row], bool]:
    return lambda row: row.set == name and length in (None, row.length)


def _of_kind(kind: str) -> Callable[[Row], bool]:
    return lambda row: row.kind == kind
