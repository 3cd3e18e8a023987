"""`kvfold transfer calibrate`: from two models and some texts to a codec."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli.checks import check_counts, check_extras, check_model
from kvfold.cli.console import JsonOption, facts, note, print_json, progress, stdout
from kvfold.cli.files import output_folder
from kvfold.cli.options import DeviceOption, DtypeOption, distinct_counts, listed, load
from kvfold.cli.train_place import ResumeOption, TextsOption, this_command
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from kvfold.training import Corpus
    from kvfold.training.words import Split
    from kvfold.transfer import CalibrationProgress, CalibrationSettings, Codec

STATE = "state"
"""Folder of what a calibration has come to, inside its own."""
PICTURE = "calibration.png"
"""Drawn beside the codec."""

ProducerArgument = Annotated[
    str, typer.Argument(help="Reads prefixes: `default`, a model's folder, or a Hub name.")
]
ConsumerArgument = Annotated[
    str, typer.Argument(help="Goes on from them: of the same architecture, other weights.")
]
PayloadOption = Annotated[
    float | None,
    typer.Option(
        help="Most bytes of a message, all included, as a share of the raw cache in bfloat16.",
        show_default="0.25, without --max-kl",
    ),
]
MaxKlOption = Annotated[
    float | None,
    typer.Option(
        "--max-kl",
        help="Instead: as few bytes as diverge by so many nats from the consumer's own.",
        show_default=False,
    ),
]
OutOption = Annotated[
    str, typer.Option(help="Folder of the codec, its picture, and the state.", metavar="DIR")
]
CountOption = Annotated[int, typer.Option(help="Texts that are read; a few more are measured on.")]
RefineOption = Annotated[
    int,
    typer.Option(
        help="Further texts, on which decoders are taught by the consumer's predictions; 0 for "
        "none."
    ),
]
TokensOption = Annotated[
    int, typer.Option(help="Tokens of a payload's prefix, and of a text without --lengths.")
]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        help="Tokens of the texts in turn, a comma between.", show_default="that of --tokens"
    ),
]
ContinuationOption = Annotated[
    int, typer.Option(help="Last tokens of a text, on which predictions are compared.")
]
PatchesOption = Annotated[int, typer.Option(help="Most patched layers; 0 leaves them out.")]
WidthsOption = Annotated[str, typer.Option(help="Bits that a code may take: 8,4 or fewer.")]
SeedOption = Annotated[int, typer.Option(help="Of texts, samples and aligners.")]


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be calibrated, and where it goes."""

    producer: str
    """As it was named."""
    consumer: str
    """As it was named."""
    texts: tuple[str, ...]
    """Sources."""
    count: int
    """Texts that are read."""
    refine: int
    """Texts that decoders are taught on."""
    lengths: tuple[int, ...]
    """Tokens of all these in turn."""
    payload: float | None
    """Share of raw."""
    max_kl: float | None
    """Nats."""
    out: Path
    """The folder."""
    dtype: str | None
    """Of the weights."""
    device: str | None
    """Where to."""


def calibrate(
    producer: ProducerArgument,
    consumer: ConsumerArgument,
    out: OutOption = "kvfold-transfer",
    payload: PayloadOption = None,
    max_kl: MaxKlOption = None,
    texts: TextsOption = "default",
    count: CountOption = 200,
    refine: RefineOption = 200,
    tokens: TokensOption = 1024,
    lengths: LengthsOption = None,
    continuation: ContinuationOption = 64,
    patches: PatchesOption = 8,
    widths: WidthsOption = "8,4",
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    resume: ResumeOption = False,
    json_output: JsonOption = False,
) -> None:
    """Make a codec that hands prefixes from one model to another of the same architecture.

    --resume goes on after an interruption; with another target it reuses what was read.
    """
    for name in (producer, consumer):
        check_model(name, dtype)
    check_counts(count=count, tokens=tokens, continuation=continuation)
    check_extras(refine=refine)
    folder = output_folder(out)
    _check_state(folder, resume=resume)
    if payload is None and max_kl is None:
        payload = 0.25
    order = Order(
        producer,
        consumer,
        listed(texts),
        count,
        refine,
        (tokens,) if lengths is None else distinct_counts(lengths),
        payload,
        max_kl,
        folder,
        dtype,
        device,
    )
    settings = _settings(locals(), order)
    try:
        codec, title = _run(order, settings)
    except KeyboardInterrupt:
        if (folder / STATE).exists():
            note(f"{folder} holds the run so far: the same command with --resume goes on with it")
        raise
    _show(codec, folder, title, json_output=json_output)


def _check_state(folder: Path, *, resume: bool) -> None:
    """Refuse a folder that holds another run, or none to resume."""
    from kvfold.transfer.artifact import FILE

    holds = (folder / STATE).exists()
    if resume and not holds:
        raise ConfigError(
            f"{folder} holds no state of a calibration to resume: leave --resume out, or name the "
            "folder of the run"
        )
    if not resume and (holds or (folder / FILE).exists()):
        raise ConfigError(
            f"{folder} holds a calibration: --resume goes on with it, or choose another --out"
        )


def _settings(given: Mapping[str, Any], order: Order) -> CalibrationSettings:
    from kvfold.transfer import CalibrationSettings
    from kvfold.transfer.probes import SHORTEST
    from kvfold.transfer.settings import Target

    bits, patches, lengths = listed(given["widths"]), given["patches"], order.lengths
    if not bits or not all(part.isdecimal() for part in bits):
        raise ConfigError(f"--widths {given['widths']!r}: give numbers of bits such as 8,4")
    settings = CalibrationSettings(
        tokens=given["tokens"],
        # As many of each length, both to choose by and to measure the result.
        probes=math.ceil(CalibrationSettings().probes / len(lengths)) * len(lengths),
        continuation=given["continuation"],
        patches=patches,
        pool=max(patches, CalibrationSettings().pool),
        widths=tuple(map(int, bits)),
        seed=given["seed"],
    )
    settings.check()
    Target(order.payload, order.max_kl)
    least = settings.continuation + SHORTEST
    if min(lengths) < least:
        option = "--tokens" if given["lengths"] is None else "--lengths"
        raise ConfigError(
            f"{option} {min(lengths)} is too short to measure by: give at least {least}, or a "
            "smaller --continuation"
        )
    for option, texts in (("--count", order.count), ("--refine", order.refine)):
        if 0 < texts < len(lengths):
            raise ConfigError(
                f"{option} {texts} is too few for {len(lengths)} lengths: give at least one text "
                "of each"
            )
    return settings


def _run(order: Order, settings: CalibrationSettings) -> tuple[Codec, str]:
    from kvfold.environment import environment
    from kvfold.home import public_name
    from kvfold.training import open_corpora
    from kvfold.transfer import calibrate as fit

    first, tokenizer = load(order.producer, order.dtype, order.device)
    second, other = load(order.consumer, order.dtype, order.device)
    settings = replace(settings, tokenizer=_shared_digest(tokenizer, other))
    corpora = open_corpora(order.texts, tokenizer, lengths=order.lengths, seed=settings.seed)
    read = _excerpts(corpora, order.count + order.refine, "train")
    # What is measured on shares nothing with what is read.
    measured = _excerpts(corpora, 2 * settings.probes, "validation")
    with progress() as report:
        codec = fit(
            first,
            second,
            [*read[: order.count], *measured],
            refine=read[order.count :],
            payload=order.payload,
            max_kl=order.max_kl,
            settings=settings,
            folder=order.out / STATE,
            on_progress=_teller(report),
        )
    names = [public_name(name) for name in (order.producer, order.consumer)]
    added = {
        "models": {"producer": names[0], "consumer": names[1]},
        "corpora": [corpus.describe() for corpus in corpora],
        "command": this_command(),
        "environment": environment(),
    }
    return replace(codec, record=codec.record | added), " to ".join(names)


def _excerpts(corpora: Sequence[Corpus], count: int, split: Split) -> list[torch.Tensor]:
    """Texts of the corpora in turn, each of a number of its own: one number has the same draws."""
    return [corpora[i % len(corpora)].excerpt(i, split).tokens for i in range(count)]


def _shared_digest(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> str:
    from kvfold.transfer import tokenizer_digest

    digests = [tokenizer_digest(each) for each in (first, second)]
    if digests[0] != digests[1]:
        raise ConfigError(
            "the two models have different tokenizers, so that no prefix is the same for both: "
            "give a base model and one fine-tuned from it"
        )
    return digests[0]


def _teller(report: Callable[[str, float], None]) -> Callable[[CalibrationProgress], None]:
    def tell(at: CalibrationProgress) -> None:
        report(f"{at.stage}: {at.done} of {at.total}", at.done / at.total)

    return tell


def _show(codec: Codec, folder: Path, title: str, *, json_output: bool) -> None:
    from kvfold.artifacts import write_files
    from kvfold.transfer.picture import draw_calibration

    path = codec.save(folder)
    (picture,) = write_files(
        folder,
        {
            PICTURE: lambda at: draw_calibration(codec.record, title).savefig(
                at, format="png", dpi=130
            )
        },
    )
    if json_output:
        print_json({"codec": str(path), "picture": str(picture), **codec.record})
        return
    record = codec.record
    stdout().print(
        facts(
            {
                "codec": path,
                "picture": picture,
                "payload": f"{record['payload']:.3f} of raw bfloat16",
                "divergence": f"{record['divergence']:.4f} nats, on texts not chosen by",
                "patched layers": ", ".join(map(str, codec.patched)) or "none",
                "took": f"{record['seconds']:.0f} s",
            },
            title=title,
        )
    )
    note(f"serve it: kvfold transfer serve {folder}")
