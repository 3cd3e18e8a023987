"""`kvfold compare`: one document and a question, answered with the full cache and smaller ones."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from kvfold.artifacts import format_bytes
from kvfold.cli.checks import check_budget, check_counts, check_methods, check_model
from kvfold.cli.console import JsonOption, note, print_json, progress, stdout, table
from kvfold.cli.files import output_folder, read_text
from kvfold.cli.options import (
    BudgetOption,
    ChunkOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    listed,
    load,
)
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvfold.evaluation import Comparison, Divergence, Document, MethodResult, Settings

COLUMNS = (
    "method",
    "kept",
    "fast",
    "slow",
    "TTFT",
    "tok/s",
    "x full",
    "KL ans.",
    "KL text",
    "right",
)
LEGEND = (
    "kept: tokens a layer after the prompt; fast, slow: all bytes by tier; TTFT: seconds to the "
    "first token; KL: nats from full, on its answer and on held-out text."
)

DocumentOption = Annotated[
    Path | None,
    typer.Option(help="A text file to ask about.", show_default="a text with three facts hidden"),
]
QuestionOption = Annotated[
    str | None, typer.Option(help="What to ask.", show_default="the middle one of the facts")
]
MethodsOption = Annotated[
    str | None,
    typer.Option(
        help="Methods, separated by commas; full is always measured.",
        show_default="full, distill, sekv, streaming, h2o, snapkv, tova, knorm",
    ),
]
NewTokensOption = Annotated[int, typer.Option(help="Most tokens of an answer.")]
OutOption = Annotated[
    str, typer.Option(help="Folder for compare.json and compare.png.", metavar="DIR")
]
LengthOption = Annotated[
    int | None, typer.Option(help="Tokens of the built-in document.", show_default="2048")
]
SeedOption = Annotated[int, typer.Option(help="Of the hidden facts and of the intervals.")]
BeforeOption = Annotated[
    bool,
    typer.Option("--compress-before-question", help="Cut the caches before the question is read."),
]


def compare(
    document: DocumentOption = None,
    question: QuestionOption = None,
    methods: MethodsOption = None,
    budget: BudgetOption = None,
    max_new_tokens: NewTokensOption = 24,
    model: ModelOption = "default",
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    length: LengthOption = None,
    seed: SeedOption = 0,
    chunk_size: ChunkOption = None,
    compress_before_question: BeforeOption = False,
    out: OutOption = "kvfold-out",
    json_output: JsonOption = False,
) -> None:
    """Answer a question about a long document with the full KV cache and with smaller ones.

    Every method reads the same prompt and may keep the same budget. Memory, time to the first
    token, decode speed and the distance to the full cache are measured here and now; a table is
    printed, and numbers and a chart are written.

    Without arguments, the default model is asked for one of three facts in a text that comes with
    Python. With your own: `kvfold compare --document report.txt --question "Who signed it?"`
    """
    command = _command(dict(locals()))
    text = _check_document(document, question, length)
    folder = output_folder(out)
    check_budget(budget)
    if methods is not None:
        check_methods(listed(methods))
    check_counts(max_new_tokens=max_new_tokens, chunk_size=chunk_size, length=length)
    check_model(model, dtype)
    settings = _settings(
        methods, budget, max_new_tokens, chunk_size, seed, early=compress_before_question
    )

    def choose(tokenizer: PreTrainedTokenizerBase) -> Document:
        return _document(tokenizer, text, document, question, length, seed)

    comparison = _measure(choose, settings, (model, dtype, device), command)
    _show(comparison, folder, json_output=json_output)


def _command(options: dict[str, object]) -> str:
    """The command line that makes the same comparison again."""
    words = ["kvfold", "compare"]
    for name, value in options.items():
        if value is None or value is False or name in ("out", "json_output"):
            continue
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    return shlex.join(words)


def _check_document(document: Path | None, question: str | None, length: int | None) -> str | None:
    """Read the user's document, if there is one."""
    if question is not None and not question.strip():
        raise ConfigError("the question is empty: give some text with --question")
    if document is None:
        return None
    if question is None:
        raise ConfigError("a document needs a question: give one with --question")
    if length is not None:
        raise ConfigError("--length is for the built-in document: leave it out with --document")
    return read_text(document)


def _settings(
    methods: str | None,
    budget: str | None,
    max_new_tokens: int,
    chunk_size: int | None,
    seed: int,
    *,
    early: bool,
) -> Settings:
    import kvfold.api  # noqa: F401 - registers the methods
    from kvfold.evaluation.settings import DEFAULT_BUDGET, Settings, default_methods

    budget = DEFAULT_BUDGET if budget is None else budget
    return Settings(
        methods=default_methods(budget) if methods is None else listed(methods),
        budget=budget,
        protocol="query-agnostic" if early else "query-aware",
        max_new_tokens=max_new_tokens,
        chunk_size=chunk_size,
        seed=seed,
    )


def _document(
    tokenizer: PreTrainedTokenizerBase,
    text: str | None,
    path: Path | None,
    question: str | None,
    length: int | None,
    seed: int,
) -> Document:
    from kvfold.evaluation.document import DEFAULT_LENGTH, built_in_document, document_from_text

    if text is not None and question is not None:
        return document_from_text(tokenizer, text, question, name=str(path))
    length = DEFAULT_LENGTH if length is None else length
    return built_in_document(tokenizer, length=length, seed=seed, question=question)


def _measure(
    choose: Callable[[PreTrainedTokenizerBase], Document],
    settings: Settings,
    source: tuple[str, str | None, str | None],
    command: str,
) -> Comparison:
    from kvfold.evaluation import compare as run

    model, tokenizer = load(*source)
    with progress() as report:
        return run(
            model,
            tokenizer,
            choose(tokenizer),
            settings,
            name=source[0],
            command=command,
            progress=report,
        )


def _show(comparison: Comparison, out: Path, *, json_output: bool) -> None:
    from kvfold.evaluation import write_comparison

    paths = write_comparison(comparison, out)
    if json_output:
        print_json(comparison.to_dict())
    else:
        _print(comparison)
    note("wrote " + " and ".join(map(str, paths)))


def _print(comparison: Comparison) -> None:
    console, subject = stdout(), comparison.subject
    marks = ("✓", "✗") if console.encoding.startswith("utf") else ("+", "x")
    settings = comparison.settings
    title = f"{subject.prompt_tokens} tokens, budget {settings.budget}, {settings.protocol}"
    rows = [_row(result, marks) for result in comparison.results]
    console.print(table(COLUMNS, rows, title=title))
    _say(console.width, LEGEND)
    _say(console.width, f"question: {subject.document.question}")
    if subject.document.expected is not None:
        _say(console.width, f"expected: {subject.document.expected}")
    for result in comparison.results:
        answer = textwrap.shorten(result.answer_line, 160, placeholder=" ...")
        _say(console.width, answer, first=f"{_mark(result, marks) or ' '} {result.method:<10} ")
        if result.after_answer is not None:
            _say(console.width, str(result.after_answer), first=f"{'':<13}")
    if not subject.document.continuation:
        _say(console.width, "The document is too short to hold text out: no KL on it.")


def _row(result: MethodResult, marks: tuple[str, str]) -> tuple[object, ...]:
    report = result.report
    return (
        result.method,
        _range(report.tokens_kept),
        format_bytes(report.bytes_fast),
        format_bytes(report.bytes_slow),
        f"{result.first_token_seconds:.2f}",
        f"{result.tokens_per_second.median:.1f}",
        f"{result.times_full.median:.2f}",
        _distance(result.on_answer),
        _distance(result.on_continuation),
        _mark(result, marks),
    )


def _range(kept: list[int]) -> str:
    least, most = min(kept), max(kept)
    return str(most) if least == most else f"{least}-{most}"


def _distance(divergence: Divergence | None) -> str | None:
    return None if divergence is None else f"{divergence.kl.mean:.4f}"


def _mark(result: MethodResult, marks: tuple[str, str]) -> str | None:
    if result.is_right is None:
        return None
    return marks[0] if result.is_right else marks[1]


def _say(width: int, line: str, *, first: str = "") -> None:
    wrapped = textwrap.fill(
        line, min(width, 100), initial_indent=first, subsequent_indent=" " * len(first)
    )
    stdout().print(Text(wrapped), soft_wrap=True)
