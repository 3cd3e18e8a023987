"""An evaluation of fidelity as tables of text, for a terminal and for pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvfold.artifacts import MIB, format_bytes
from kvfold.bench.spread import Spread
from kvfold.evaluation.fidelity_costs import Cost
from kvfold.evaluation.fidelity_grid import Cell
from kvfold.evaluation.fidelity_report import Difference, Report, Summary
from kvfold.evaluation.fidelity_settings import FidelitySettings
from kvfold.evaluation.statistics import Interval, Share


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of text."""

    columns: Sequence[str]
    """What stands above them."""
    rows: Sequence[Sequence[str | None]]
    """None where there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a report."""

    title: str
    """What stands above it."""
    text: str | None = None
    """What it says, or what the columns of its table and of those before mean."""
    command: str | None = None
    """What makes the report again."""
    table: Table | None = None
    """Its numbers."""


COLUMNS = (
    "method",
    "budget",
    "KL to full (95 %)",
    "top-1",
    "perplexity (95 %)",
    "score",
    "of full",
    "repet.",
    "overl.",
    "wrong",
    "length",
    "kept",
    "bytes",
)
"""Of a table of one group."""
DIFFERENCE_COLUMNS = ("group", "budget", "method", "other", "KL less the other's (95 %)", "so")
"""Of the table of differences."""
GRID_COLUMNS = (
    "length",
    "method",
    "budget",
    "right",
    "share (95 %)",
    "of full",
    "found",
    "fast",
    "slow",
)
"""Of a table of one set's answers by length."""
GRID_LEGEND = (
    "right: answers that are, of all; share: the same with its Wilson interval; of full: the same "
    "as a share of the full cache's; found: share of what is asked for, where all of several is; "
    "fast, slow: bytes on the tier that attention reads and on the other, everything counted, "
    "as shares of a full cache's after the prompt."
)
"""What the columns mean."""
COST_COLUMNS = ("set", "length", "method", "budget", "rows", "first token s", "tokens/s", "MiB")
"""Of the table of time and memory."""
COST_TITLE = "Time and memory, measured while evaluating, not a benchmark"
"""What stands above it."""
COST_LEGEND = (
    "Medians over samples with their range. rows: samples that were run together; first token: "
    "seconds to read their prompts, to fill the cache and to read questions that come later (a "
    "prompt is read once for all methods, and counts for each); tokens/s: of all rows together, "
    "over the tokens that the full cache says, the same for every method; MiB: of the cache a row, "
    "the most that it held after a forward, both tiers. Nothing was repeated, and whatever else "
    "ran on the machine is in these numbers: kvfold bench measures speed and memory."
)
"""What the columns mean."""
LEGEND = (
    "KL: nats from the full cache's next-token distribution, mean over samples and its bootstrap "
    "interval, eviction at every decoded token; top-1: share of tokens on whose likeliest "
    "successor both agree; perplexity: of texts after their first forced token, with its bootstrap "
    "interval over samples; score: share of right answers, or mean of a benchmark's own score, and "
    "that as a share of the full cache's; "
    "repet., overl., wrong: share of answers that repeat themselves, that do not end where the "
    "full cache's does, and that are wrong otherwise; length: of answers, as a multiple of the "
    "full cache's; kept, bytes: tokens a layer and share of a full cache's bytes after the prompt."
)
"""What the columns mean."""


def summary_rows(summaries: Iterable[Summary]) -> list[tuple[str | None, ...]]:
    """Cells of one group's table, in the order of `COLUMNS`."""
    return [
        (
            each.method,
            each.budget,
            None if each.kl is None else _interval(each.kl),
            _percent(each.agreement),
            None if each.perplexity is None else _interval(each.perplexity, 2),
            _percent(each.score),
            _percent(each.share_of_full),
            *((None,) * 3 if each.faults is None else map(_percent, each.faults.values())),
            None if each.answer_length is None else f"{each.answer_length:.2f}x",
            f"{each.tokens_kept:.0f}",
            _percent(each.bytes_share),
        )
        for each in summaries
    ]


def difference_rows(differences: Iterable[Difference]) -> list[tuple[str, ...]]:
    """Cells of the table of differences, in the order of `DIFFERENCE_COLUMNS`."""
    return [
        (each.group, each.budget, each.method, each.other, _interval(each.kl), each.verdict)
        for each in differences
    ]


def grid_rows(cells: Iterable[Cell]) -> list[tuple[str | None, ...]]:
    """Cells of one set's table by length, in the order of `GRID_COLUMNS`."""
    return [
        (
            "all" if each.length is None else str(each.length),
            each.method,
            each.budget,
            f"{each.answers.right} of {each.answers.count}",
            _share(each.answers),
            _percent(each.share_of_full),
            _percent(each.found),
            _percent(each.bytes_fast),
            _percent(each.bytes_slow),
        )
        for each in cells
    ]


def cost_rows(costs: Iterable[Cost]) -> list[tuple[str | None, ...]]:
    """Cells of the table of time and memory, in the order of `COST_COLUMNS`."""
    return [
        (
            each.set,
            str(each.length),
            each.method,
            each.budget,
            _spread(each.batch_rows, ".0f"),
            _spread(each.first_token_seconds, ".2f"),
            _spread(each.tokens_per_second, ".1f"),
            _spread(each.bytes_peak, ".2f", unit=MIB),
        )
        for each in costs
    ]


def cost_text(report: Report) -> str:
    """What the columns of time and memory mean, and what the process took as a whole."""
    peak = report.fidelity.process_peak
    if peak is None:
        return COST_LEGEND
    return (
        f"{COST_LEGEND} The process took {format_bytes(peak)} of memory at most, with the model, "
        "the prompts, the full cache and each method's beside it."
    )


def grids(report: Report) -> dict[str, list[Cell]]:
    """Cells by what stands above their table.

    Where lengths, depths and questions are as ever, only those of which a share can be found.
    """
    settings = report.fidelity.settings
    is_plain = (
        len(settings.lengths) == 1 and settings.depths is None and settings.protocol == "aware"
    )
    found: dict[str, list[Cell]] = {}
    for each in report.cells:
        if is_plain and each.found is None:
            continue
        title = f"{each.set}, right answers by length, protocol {settings.protocol}"
        found.setdefault(title, []).append(each)
    return found


def by_group(summaries: Iterable[Summary]) -> dict[str, list[Summary]]:
    """Summaries by group, in order."""
    found: dict[str, list[Summary]] = {}
    for each in summaries:
        found.setdefault(each.group, []).append(each)
    return found


def title_of(group: str, summaries: Sequence[Summary]) -> str:
    """What stands above a group's table."""
    fewest, most = (choose(each.samples for each in summaries) for choose in (min, max))
    cut = max(each.cut for each in summaries)
    title = f"{group}: {most if fewest == most else f'{fewest} to {most}'} samples"
    return f"{title}, {cut} of them cut in the middle" if cut else title


def parts(report: Report) -> list[Part]:
    """The whole report, in order."""
    subject, settings = report.fidelity.subject, report.fidelity.settings
    commit = report.fidelity.environment.get("commit") or "an installed package"
    found = [
        Part(
            "Fidelity to the full cache",
            f"Model {subject.model} ({subject.dtype} on {subject.device}), prompts of up to "
            f"{_listed(settings.lengths)} tokens, protocol {settings.protocol}, {settings.samples} "
            f"samples a set{' and length' if len(settings.lengths) > 1 else ''}, {settings.tokens} "
            f"forced tokens a text, answers of up to {_limits(settings)} tokens, seed "
            f"{settings.seed}; kvfold {report.fidelity.environment.get('kvfold')}, {commit}.",
            command=report.fidelity.command,
        )
    ]
    for group, summaries in by_group(report.summaries).items():
        table = Table(COLUMNS, summary_rows(summaries))
        found.append(Part(title_of(group, summaries), table=table))
    found[-1] = replace(found[-1], text=LEGEND)
    tables = grids(report)
    for title, cells in tables.items():
        found.append(Part(title, table=Table(GRID_COLUMNS, grid_rows(cells))))
    if tables:
        found[-1] = replace(found[-1], text=GRID_LEGEND)
    if report.differences:
        title = f"{settings.compared_with} against the others, sample by sample"
        table = Table(DIFFERENCE_COLUMNS, difference_rows(report.differences))
        found.append(Part(title, table=table))
    if report.costs:
        table = Table(COST_COLUMNS, cost_rows(report.costs))
        found.append(Part(COST_TITLE, cost_text(report), table=table))
    return found


def _limits(settings: FidelitySettings) -> str:
    return _listed(sorted({settings.answer_tokens(name) for name in settings.sets}))


def _listed(lengths: Sequence[int]) -> str:
    *rest, last = map(str, lengths)
    return f"{', '.join(rest)} or {last}" if rest else last


def _interval(interval: Interval, digits: int = 4) -> str:
    mean, low, high = (f"{e:.{digits}f}" for e in (interval.mean, interval.low, interval.high))
    return f"{mean} ({low} to {high})"


def _share(share: Share) -> str:
    low, high = share.bounds
    return f"{share.mean:.1%} ({low:.1%} to {high:.1%})"


def _spread(spread: Spread | None, spec: str, *, unit: int = 1) -> str | None:
    """A median, and its range where it has one."""
    if spread is None:
        return None
    numbers = (spread.median, spread.lowest, spread.highest)
    shown, low, high = (format(number / unit, spec) for number in numbers)
    return shown if low == high else f"{shown} ({low} to {high})"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"
