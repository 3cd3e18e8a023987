"""`kvfold transfer bench`: how soon the first token comes, with codes and without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.artifacts import format_bytes
from kvfold.cli.checks import check_counts, check_model
from kvfold.cli.console import JsonOption, note, print_json, progress, stdout, table
from kvfold.cli.files import output_folder
from kvfold.cli.options import DeviceOption, DtypeOption, listed, load
from kvfold.cli.train_place import TextsOption, this_command
from kvfold.cli.transfer_calibrate import ConsumerArgument, ProducerArgument
from kvfold.cli.transfer_options import CodecsArgument, codec_paths, load_codecs
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from kvfold.transfer.entrant import Entrant
    from kvfold.transfer.race import RaceSettings

NAME = "transfer-bench"
"""Of the files, before their endings."""

TokensOption = Annotated[int, typer.Option(help="Tokens of the prefix.")]
BandwidthsOption = Annotated[
    str, typer.Option(help="Mbit/s that the connection carries, a comma between.")
]
ContinuationOption = Annotated[
    int, typer.Option(help="Tokens after the prefix that predictions are compared on.")
]
RoundsOption = Annotated[int, typer.Option(help="In which all take their turn, after one unseen.")]
OutOption = Annotated[
    str | None, typer.Option(help="Folder for the result as JSON and as a chart.", metavar="DIR")
]
SeedOption = Annotated[int, typer.Option(help="Of the text that is drawn.")]


@dataclass(frozen=True, slots=True)
class Contest:
    """What is measured on what."""

    producer: str
    """As it was named."""
    consumer: str
    """As it was named."""
    codecs: tuple[Path, ...]
    """Files or folders."""
    texts: tuple[str, ...]
    """Sources."""
    tokens: int
    """Of the prefix."""
    seed: int
    """Of the text."""
    dtype: str | None
    """Of the weights."""
    device: str | None
    """Where to."""


def bench(
    producer: ProducerArgument,
    consumer: ConsumerArgument,
    codecs: CodecsArgument = None,
    tokens: TokensOption = 1024,
    bandwidths: BandwidthsOption = "100,1000,10000",
    texts: TextsOption = "default",
    continuation: ContinuationOption = 64,
    rounds: RoundsOption = 3,
    seed: SeedOption = 0,
    out: OutOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Measure the time to the first token by stage, against the consumer's own prefill.

    Bytes go through a connection of this machine that is held to a stated bandwidth. Raw, rotated
    anew, int8, int4 and selective recompute are the baselines, timed in their favour.
    """
    folder = None if out is None else output_folder(out)
    for name in (producer, consumer):
        check_model(name, dtype)
    check_counts(tokens=tokens, continuation=continuation, rounds=rounds)
    rates = _bandwidths(bandwidths)
    from kvfold.transfer.race import RaceSettings

    settings = RaceSettings(bandwidths=rates, continuation=continuation, rounds=rounds)
    paths = codec_paths(codecs)
    contest = Contest(producer, consumer, paths, listed(texts), tokens, seed, dtype, device)
    entrants, names = _run(contest, settings)
    document = _document(entrants, contest, settings, names)
    if folder is not None:
        _write(entrants, document, settings, folder, " to ".join(names))
    if json_output:
        print_json(document)
        return
    _show(entrants, settings, " to ".join(names))


def _bandwidths(text: str) -> tuple[float, ...]:
    try:
        found = tuple(1e6 * float(part) for part in listed(text))
    except ValueError:
        found = ()
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise ConfigError(f"--bandwidths {text!r}: give Mbit/s above 0, such as 100,1000")
    return found


def _run(contest: Contest, settings: RaceSettings) -> tuple[dict[str, Entrant], list[str]]:
    from kvfold.home import public_name
    from kvfold.training import open_corpus
    from kvfold.transfer.race import race

    codecs = load_codecs(contest.codecs)
    first, tokenizer = load(contest.producer, contest.dtype, contest.device)
    second, _ = load(contest.consumer, contest.dtype, contest.device)
    length = contest.tokens + settings.continuation
    text = open_corpus(contest.texts, tokenizer, length=length, seed=contest.seed).excerpt(
        0, "validation"
    )
    with progress() as report:
        entrants = race(codecs, first, second, text.tokens, settings, report)
    return entrants, [public_name(name) for name in (contest.producer, contest.consumer)]


def _document(
    entrants: Mapping[str, Entrant], contest: Contest, settings: RaceSettings, names: list[str]
) -> dict[str, object]:
    from kvfold.environment import environment
    from kvfold.transfer.entrant import OWN

    own = median(entrants[OWN].total(settings.bandwidths[0], kept=True))
    subjects = {}
    for name, entrant in entrants.items():
        found = entrant.to_dict()
        if name != OWN:
            found["crossover"] = {
                "kept": entrant.crossover(own, kept=True),
                "cold": entrant.crossover(own, kept=False),
            }
        subjects[name] = found
    return {
        "producer": names[0],
        "consumer": names[1],
        "tokens": contest.tokens,
        "settings": asdict(settings),
        "subjects": subjects,
        "command": this_command(),
        "environment": environment(),
    }


def _write(
    entrants: Mapping[str, Entrant],
    document: dict[str, object],
    settings: RaceSettings,
    folder: Path,
    title: str,
) -> None:
    from kvfold.artifacts import json_text, write_files
    from kvfold.transfer.race_picture import draw_race

    figure = draw_race(entrants, settings.bandwidths, title)
    for path in write_files(
        folder,
        {
            f"{NAME}.json": lambda at: at.write_text(json_text(document), encoding="utf-8"),
            f"{NAME}.png": lambda at: figure.savefig(at, format="png", dpi=130),
        },
    ):
        note(f"wrote {path}")


def _show(entrants: Mapping[str, Entrant], settings: RaceSettings, title: str) -> None:
    from kvfold.transfer.entrant import OWN, STAGES

    columns = ("subject", "payload", "KL", "perplexity", *(f"ms {stage}" for stage in STAGES))
    stdout().print(table(columns, _stage_rows(entrants, STAGES), title=title))
    own = entrants[OWN]
    heads = [f"{rate / 1e6:g} Mbit/s" for rate in settings.bandwidths]
    for kept, what in ((True, "the producer has read the prefix"), (False, "it reads it first")):
        rows = [
            (name, *(_sooner(own, entrant, rate, kept) for rate in settings.bandwidths))
            for name, entrant in entrants.items()
            if name != OWN
        ]
        stdout().print(f"times as soon as the consumer's own prefill; {what}", soft_wrap=True)
        stdout().print(table(("subject", *heads), rows))


def _stage_rows(
    entrants: Mapping[str, Entrant], stages: tuple[str, ...]
) -> Iterable[tuple[object, ...]]:
    for name, entrant in entrants.items():
        times = [entrant.seconds.get(stage) for stage in stages]
        yield (
            name,
            format_bytes(entrant.payload),
            f"{entrant.divergence:.4f}",
            f"{entrant.perplexity:.2f}",
            *(None if found is None else f"{1000 * median(found):.1f}" for found in times),
        )


def _sooner(own: Entrant, entrant: Entrant, rate: float, kept: bool) -> str:
    from kvfold.bench.spread import divide

    return f"{divide(own.total(rate, kept=kept), entrant.total(rate, kept=kept)):.2f}"
