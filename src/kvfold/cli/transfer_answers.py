"""`kvfold transfer answers`: what a consumer answers over prefixes that were handed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli.checks import check_counts, check_model
from kvfold.cli.console import JsonOption, note, print_json, progress, stdout, table
from kvfold.cli.files import output_folder
from kvfold.cli.options import DeviceOption, DtypeOption, load, token_counts
from kvfold.cli.train_place import this_command
from kvfold.cli.transfer_calibrate import ConsumerArgument, ProducerArgument
from kvfold.cli.transfer_options import CodecsArgument, check_tokenizer, codec_paths, load_codecs

if TYPE_CHECKING:
    from kvfold.evaluation.handover import HandoverRow, HandoverSettings
    from kvfold.evaluation.handover_report import Summary
    from kvfold.evaluation.statistics import Interval

NAME = "transfer-answers"
"""Of the files, before their endings."""

ItemsOption = Annotated[int, typer.Option(help="Held-out passages, each with a question.")]
LengthsOption = Annotated[
    str, typer.Option(help="Tokens of the passages in turn, a comma between.")
]
OutOption = Annotated[
    str, typer.Option(help="Folder for the answers, the result and its picture.", metavar="DIR")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the answers in the folder.")
]
SeedOption = Annotated[int, typer.Option(help="Of the items and of the intervals.")]


@dataclass(frozen=True, slots=True)
class Examination:
    """Who is asked, and where it goes."""

    producer: str
    """As it was named."""
    consumer: str
    """As it was named."""
    codecs: tuple[Path, ...]
    """Files, folders, or `shipped`."""
    out: Path
    """The folder."""
    dtype: str | None
    """Of the weights."""
    device: str | None
    """Where to."""


def answers(
    producer: ProducerArgument,
    consumer: ConsumerArgument,
    codecs: CodecsArgument = None,
    items: ItemsOption = 100,
    lengths: LengthsOption = "256,512,1024,2048",
    seed: SeedOption = 0,
    out: OutOption = "kvfold-answers",
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    resume: ResumeOption = False,
    json_output: JsonOption = False,
) -> None:
    """Measure a consumer's answers over prefixes that were handed over, with codes and without.

    Held-out passages of records are handed over by each codec and each baseline; F1, exact match
    and divergence stand beside those of the consumer that read the passage itself (the oracle).

    Results are written as they come: an interrupted run goes on with --resume, and so does one with
    more items or codecs.
    """
    folder = output_folder(out)
    for name in (producer, consumer):
        check_model(name, dtype)
    given = token_counts(lengths)
    check_counts(items=items, lengths=min(given))
    from kvfold.evaluation.fidelity_rows import require_folder
    from kvfold.evaluation.handover import HandoverSettings

    require_folder(folder, resume=resume)
    settings = HandoverSettings(items=items, lengths=given, seed=seed)
    exam = Examination(producer, consumer, codec_paths(codecs), folder, dtype, device)
    document, summaries, title = _run(exam, settings, resume=resume)
    _write(document, summaries, folder, title)
    if json_output:
        print_json(document)
        return
    _show(summaries, title)


def _run(
    exam: Examination, settings: HandoverSettings, *, resume: bool
) -> tuple[dict[str, object], list[Summary], str]:
    from kvfold.evaluation.handover import measure_handover
    from kvfold.evaluation.handover_report import summarise
    from kvfold.home import public_name

    codecs = load_codecs(exam.codecs)
    first, tokenizer = load(exam.producer, exam.dtype, exam.device)
    second, other = load(exam.consumer, exam.dtype, exam.device)
    for codec in codecs.values():
        check_tokenizer(codec, tokenizer, "producer")
        check_tokenizer(codec, other, "consumer")
    with progress() as report:
        rows = measure_handover(
            first, second, tokenizer, codecs, settings, exam.out, resume=resume, on_progress=report
        )
    summaries = summarise(rows, seed=settings.seed)
    names = [public_name(name) for name in (exam.producer, exam.consumer)]
    document = _document(summaries, rows, settings, names, f"{second.dtype}", f"{second.device}")
    return document, summaries, " to ".join(names)


def _document(
    summaries: Sequence[Summary],
    rows: Sequence[HandoverRow],
    settings: HandoverSettings,
    names: Sequence[str],
    dtype: str,
    device: str,
) -> dict[str, object]:
    from kvfold.environment import environment

    return {
        "producer": names[0],
        "consumer": names[1],
        "settings": asdict(settings),
        "dtype": dtype.removeprefix("torch."),
        "device": device,
        "ways": [summary.to_dict() for summary in summaries],
        "by_length": _by_length(rows),
        "command": this_command(),
        "environment": environment(),
    }


def _by_length(rows: Sequence[HandoverRow]) -> dict[str, dict[str, float]]:
    """Mean F1 by length of the prefix and way."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        found.setdefault(str(row.tokens), {}).setdefault(row.way, []).append(row.f1)
    return {
        length: {way: sum(each) / len(each) for way, each in ways.items()}
        for length, ways in found.items()
    }


def _write(
    document: dict[str, object], summaries: Sequence[Summary], folder: Path, title: str
) -> None:
    from kvfold.artifacts import json_text, write_files
    from kvfold.evaluation.handover_report import draw_answers

    figure = draw_answers(summaries, title)
    for path in write_files(
        folder,
        {
            f"{NAME}.json": lambda at: at.write_text(json_text(document), encoding="utf-8"),
            f"{NAME}.png": lambda at: figure.savefig(at, format="png", dpi=130),
        },
    ):
        note(f"wrote {path}")


def _show(summaries: Sequence[Summary], title: str) -> None:
    columns = ("way", "payload", "F1", "F1 of the oracle's", "F1 lost", "exact", "KL, nats")
    rows = [
        (
            each.way,
            f"{each.share:.3f}",
            _told(each.f1),
            None if each.kept is None else f"{each.kept:.3f}",
            _told(each.lost),
            _told(each.exact),
            _told(each.divergence),
        )
        for each in summaries
    ]
    stdout().print(table(columns, rows, title=f"{title}, {summaries[0].f1.count} items"))


def _told(found: Interval) -> str:
    return f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"
