"""`kvfold eval`: how faithful methods are to the full cache, on held-out samples."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from kvfold.cli.checks import check_budget, check_counts, check_model
from kvfold.cli.console import JsonOption, note, print_json, progress, stdout, table
from kvfold.cli.files import output_folder
from kvfold.cli.options import DeviceOption, DtypeOption, ModelOption, listed, load
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from kvfold.evaluation.fidelity_report import Report
    from kvfold.evaluation.fidelity_settings import FidelitySettings

MethodsOption = Annotated[
    str | None,
    typer.Option(
        help="What to judge, a comma between several: a method, method:option=value+option=value, "
        "or either after name=, as in short=distill:policy=FOLDER+every=1.",
        show_default="all that evict",
    ),
]
BudgetsOption = Annotated[
    str, typer.Option(help="What each may keep, a comma between several: shares or tokens.")
]
SetsOption = Annotated[
    str | None,
    typer.Option(
        "--sets",
        "--tasks",
        help="Samples, a comma between several: prose, repetition, niah, niah-multikey, "
        "niah-multivalue, arithmetic, wikitext, hotpotqa, gsm8k, and RULER's: ruler-single-1, -2 "
        "and -3, ruler-multikey-1, -2 and -3, ruler-multivalue, ruler-multiquery, ruler-vt, "
        "ruler-cwe, ruler-fwe, ruler-qa; ruler stands for all of RULER's whose data is at hand. "
        "Public benchmarks as they are: longbench/TASK, infinitebench/TASK, ruler/TASK, bbh/TASK, "
        "cmrc2018/dev, hotpotqa/distractor; all as TASK stands for those whose data is at hand. "
        "Environment variable KVFOLD_DATA names the folder of the files that these, wikitext, "
        "hotpotqa, gsm8k and ruler-qa need; needles are hidden in wikitext then.",
        show_default="prose,niah; wikitext,hotpotqa,niah,gsm8k with KVFOLD_DATA",
    ),
]
SamplesOption = Annotated[int, typer.Option(help="Of each set and length.")]
LengthOption = Annotated[
    str,
    typer.Option(
        help="Tokens of a prompt, at most, a comma between several; with --protocol agnostic, of "
        "prompt and answer together. Longer prompts of public benchmarks lose their middle."
    ),
]
ProtocolOption = Annotated[
    str,
    typer.Option(
        help="aware: a cache is cut after it has read the question. agnostic: it is cut before, "
        "and reads the question later, like a chat's next turn."
    ),
]
DepthsOption = Annotated[
    int | None,
    typer.Option(
        help="Hide needles at so many depths in turn, evenly from a text's beginning to its end.",
        show_default="anywhere",
    ),
]
TokensOption = Annotated[int, typer.Option(help="Tokens of a text's continuation.")]
NewTokensOption = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of an answer.",
        show_default="what each set needs: 32, and more in some of RULER's",
    ),
]
BatchOption = Annotated[
    int,
    typer.Option(help="Samples that are run together, at most: fewer where prompts are long."),
]
OutOption = Annotated[
    str,
    typer.Option(
        help="Folder for results.jsonl, the page eval.html, eval.json, eval.md, eval.png, "
        "tradeoff.png and, with --depths, a picture of each set of needles.",
        metavar="DIR",
    ),
]
BaselineOption = Annotated[
    str | None,
    typer.Option(
        help="Method that every other is compared with.", show_default="distill if it is judged"
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the results in the folder.")
]
SeedOption = Annotated[int, typer.Option(help="Of the samples and of the intervals.")]

WorkersOption = Annotated[
    int,
    typer.Option(
        help="Processes that share the batches, each with the model, on a GPU of its own."
    ),
]

_AS_GIVEN = (
    *("samples", "protocol", "depths", "tokens", "max_new_tokens", "batch", "seed", "baseline"),
)
"""Options that are settings as they stand."""


def eval(
    model: ModelOption = "default",
    methods: MethodsOption = None,
    budgets: BudgetsOption = "0.25,0.125",
    sets: SetsOption = None,
    samples: SamplesOption = 16,
    length: LengthOption = "768",
    protocol: ProtocolOption = "aware",
    depths: DepthsOption = None,
    tokens: TokensOption = 32,
    max_new_tokens: NewTokensOption = None,
    batch: BatchOption = 8,
    baseline: BaselineOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    workers: WorkersOption = 1,
    out: OutOption = "kvfold-eval",
    resume: ResumeOption = False,
    json_output: JsonOption = False,
) -> None:
    """Measure how faithful methods are to the full KV cache, on held-out texts and tasks.

    A text's continuation, or the full cache's own answer, is forced into each method's cache a
    token at a time, so that it evicts at every step; the distance between the distributions, the
    agreement on the likeliest token and the answers are measured, with paired statistics.

    An interrupted run goes on with --resume, and so does one with more samples, methods or sets.
    """
    given = dict(locals())
    folder = output_folder(out)
    check_model(model, dtype)
    check_counts(tokens=tokens, max_new_tokens=max_new_tokens)
    for each in listed(budgets):
        check_budget(each)
    settings = _settings(
        methods=methods,
        budgets=listed(budgets),
        sets=sets,
        lengths=_lengths(length),
        **{name: given[name] for name in _AS_GIVEN},
    )
    _check(settings, folder, resume=resume)
    # Which sets a group stands for, or are asked without any name, depends on the data at hand.
    command = _command(given | {"sets": ",".join(settings.sets)})
    source = (model, dtype, device)
    if workers != 1:
        _run_parts(settings, source, folder, workers)
    report = _run(settings, source, folder, command, resume=resume or workers > 1)
    _show(report, folder, json_output=json_output)


def _lengths(text: str) -> tuple[int, ...]:
    """The lengths of a comma-separated list.

    Raises:
        ConfigError: For what is no positive number.
    """
    parts = listed(text)
    for part in parts:
        if re.fullmatch(r"[+-]?\d+", part) is None:
            raise ConfigError(f"--length {part} is no number: give tokens, such as 1024,2048")
        check_counts(length=int(part))
    return tuple(map(int, parts))


def _command(options: Mapping[str, object]) -> str:
    """The command line that makes the same evaluation again."""
    words = ["kvfold", "eval"]
    for name, value in options.items():
        if value is not None and name not in ("out", "resume", "json_output"):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _settings(*, methods: str | None, sets: str | None, **others: object) -> FidelitySettings:
    import kvfold.api  # noqa: F401 - registers the methods
    from kvfold.evaluation.fidelity_settings import (
        FidelitySettings,
        MethodSpec,
        default_methods,
    )
    from kvfold.evaluation.samples import default_sets, expand_sets

    named = default_methods() if methods is None else map(MethodSpec.parse, listed(methods))
    return FidelitySettings(
        methods=tuple(named),
        sets=default_sets() if sets is None else expand_sets(listed(sets)),
        **others,  # pyright: ignore[reportArgumentType]
    )


def _check(settings: FidelitySettings, folder: Path, *, resume: bool) -> None:
    """Refuse results that are in the way and data that cannot be had, before a model is loaded."""
    from kvfold.evaluation.fidelity_rows import require_folder
    from kvfold.evaluation.samples import require_sets

    require_folder(folder, resume=resume)
    require_sets(settings.sets)


def _run_parts(
    settings: FidelitySettings,
    source: tuple[str, str | None, str | None],
    folder: Path,
    workers: int,
) -> None:
    from kvfold.evaluation.fidelity_workers import Source, evaluate_parts

    with progress() as report:
        evaluate_parts(
            Source(*source), settings, folder=folder, workers=workers, on_progress=report
        )


def _run(
    settings: FidelitySettings,
    source: tuple[str, str | None, str | None],
    folder: Path,
    command: str,
    *,
    resume: bool,
) -> Report:
    from kvfold.evaluation.fidelity import evaluate
    from kvfold.evaluation.fidelity_report import report_of

    model, tokenizer = load(*source)
    with progress() as report:
        found = evaluate(
            model,
            tokenizer,
            settings,
            folder=folder,
            resume=resume,
            name=source[0],
            command=command,
            on_progress=report,
        )
    return report_of(found)


def _show(report: Report, folder: Path, *, json_output: bool) -> None:
    from kvfold.evaluation.fidelity_export import write_report

    paths = write_report(report, folder)
    if json_output:
        print_json(report.to_dict())
    else:
        _print(report)
    note("wrote " + ", ".join(map(str, paths)))


def _print(report: Report) -> None:
    from kvfold.evaluation import fidelity_tables as tables

    console = stdout()
    for group, summaries in tables.by_group(report.summaries).items():
        rows = tables.summary_rows(summaries)
        console.print(table(tables.COLUMNS, rows, title=tables.title_of(group, summaries)))
    console.print(_wrapped(tables.LEGEND, console.width), soft_wrap=True)
    grids = tables.grids(report)
    for title, cells in grids.items():
        console.print(table(tables.GRID_COLUMNS, tables.grid_rows(cells), title=title))
    if grids:
        console.print(_wrapped(tables.GRID_LEGEND, console.width), soft_wrap=True)
    if report.differences:
        rows = tables.difference_rows(report.differences)
        console.print(table(tables.DIFFERENCE_COLUMNS, rows, title="Sample by sample"))
    if report.costs:
        rows = tables.cost_rows(report.costs)
        console.print(table(tables.COST_COLUMNS, rows, title=tables.COST_TITLE))
        console.print(_wrapped(tables.cost_text(report), console.width), soft_wrap=True)


def _wrapped(text: str, width: int) -> Text:
    return Text(textwrap.fill(text, min(width, 100)))
