"""What the commands of `kvfold diffuse` share: models, caches and samplers from their options."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli.checks import check_counts, check_model
from kvfold.cli.files import read_text
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvfold.diffusion import DiffusionCache, DiffusionModel, Sampler

DiffusionOption = Annotated[
    str,
    typer.Option(
        "--model", help="`arithmetic`, `adapted`, a folder, or a Hub name; see `kvfold diffuse`."
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        help="For spa: curve, rank and ratio that `kvfold diffuse calibrate` wrote.",
        metavar="JSON",
        show_default=False,
    ),
]
SamplerOption = Annotated[
    str | None,
    typer.Option(
        "--sampler",
        help="llada or dream, options after colons, as in dream:algorithm=entropy:top_p=0.9.",
        show_default="the model's own",
    ),
]
LengthOption = Annotated[int, typer.Option("--length", help="Tokens to write.")]
StepsOption = Annotated[
    int | None,
    typer.Option("--steps", help="Steps of the schedule.", show_default="as many as tokens"),
]
BlockOption = Annotated[
    int | None,
    typer.Option("--block-length", help="For llada: tokens of a block.", show_default="all"),
]
ThresholdOption = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        help="Decide all tokens as sure as this in a step, instead of a schedule.",
        show_default=False,
    ),
]
FactorOption = Annotated[
    float | None,
    typer.Option(
        "--factor",
        help="Decide as many tokens as the factor rule allows, instead of a schedule.",
        show_default=False,
    ),
]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="0 for the likeliest token, more for chance.")
]
MaskOption = Annotated[
    int | None,
    typer.Option(
        "--mask-token-id", help="Of the undecided token.", show_default="as the model tells"
    ),
]
PredictionOption = Annotated[
    str | None,
    typer.Option(
        "--prediction",
        help="Where a token is predicted: same place, or shifted.",
        show_default="as the model tells",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the sampling.")]

_SAMPLING = ("steps", "block_length", "threshold", "factor", "temperature")
"""Options of samplers that are options of the commands."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How texts are written, as the options say it."""

    sampler: str | None
    """A sampler with options, or None for the model's own."""
    options: Mapping[str, object]
    """Options of the sampler that were given by themselves."""

    def make(self, model: DiffusionModel | None = None) -> Sampler | None:
        """The sampler; None when its name must be asked of a model that is not given.

        Raises:
            ConfigError: There is none of that name, or it cannot take the options.
        """
        from kvfold.diffusion.spec import sampler_of

        spec = self.sampler
        if spec is None and model is not None:
            spec = model.traits.sampler
        return None if spec is None else sampler_of(spec, self.options)


def choice_of(given: Mapping[str, Any]) -> Choice:
    """What a sampler is made of, checked as far as it can be without a model.

    Args:
        given: A command's options by name, others among them.

    Raises:
        ConfigError: Naming the option that cannot be used.
    """
    options = {name: given.get(name) for name in _SAMPLING}
    options["temperature"] = options["temperature"] or None
    named = {name: value for name, value in options.items() if value is not None}
    choice = Choice(given["sampler"], named)
    choice.make()
    return choice


def make_caches(specs: tuple[str, ...], calibration: Path | None) -> dict[str, DiffusionCache]:
    """Caches by what they were written as.

    Args:
        specs: Such as `dual` or `spa:preset=paper:ratio=0.2`.
        calibration: File with settings for every `spa`; options go before them.

    Raises:
        ConfigError: A name, option or value is none, or a cache is named twice.
        ArtifactError: The file cannot be read.
    """
    from kvfold.diffusion import Calibration
    from kvfold.diffusion.spec import cache_of, parse_spec

    if not specs or len(set(specs)) < len(specs):
        raise ConfigError(f"the caches are {', '.join(specs) or 'none'}: name each once")
    fitted = None if calibration is None else Calibration.load(calibration)
    if fitted is not None and all(parse_spec(spec)[0] != "spa" for spec in specs):
        raise ConfigError("--calibration is for spa: name it as a cache, or leave the file out")
    return {spec: cache_of(spec, fitted) for spec in specs}


def open_model(given: Mapping[str, Any]) -> tuple[DiffusionModel, PreTrainedTokenizerBase]:
    """Load the diffusion model that a command's options name, and its tokenizer."""
    from kvfold.diffusion import DiffusionModel, load_tokenizer

    names = ("dtype", "device", "mask_token_id", "prediction")
    model = DiffusionModel.from_pretrained(given["model"], **{name: given[name] for name in names})
    return model, load_tokenizer(given["model"])


def check_writing(given: Mapping[str, Any]) -> None:
    """Refuse of a command's options what can be refused before torch is imported."""
    check_model(given["model"], given["dtype"])
    check_counts(length=given["length"])
    if given["prediction"] not in (None, "same", "shifted"):
        raise ConfigError(f"--prediction {given['prediction']!r}: give same or shifted")


def prompt_of(given: str | None, file: Path | None) -> str:
    """The prompt that stands on the command line, on standard input (-) or in a file.

    Raises:
        ConfigError: There is none or more than one, it is blank, or it is not UTF-8.
    """
    if (given is None) == (file is None):
        raise ConfigError("give one prompt: as text, as - for standard input, or with --file")
    if file is not None:
        return read_text(file)
    text = given or ""
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"standard input is not UTF-8 text (byte {error.start}): convert it to UTF-8 first"
            ) from error
    if not text.strip():
        raise ConfigError("the prompt is empty: give some text")
    return text


def prompts_of(
    given: list[str] | None, file: Path | None, *, optional: bool = False
) -> tuple[str, ...]:
    """The prompts that stand on the command line and in a file, one a line.

    Raises:
        ConfigError: There is none where there must be, one is blank, or the file is none.
    """
    texts = list(given or [])
    if file is not None:
        texts += [line for line in read_text(file).splitlines() if line.strip()]
    if not texts and not optional:
        raise ConfigError("no prompt was given: give some as text, or --file with one a line")
    if any(not text.strip() for text in texts):
        raise ConfigError("a prompt is empty: give some text")
    return tuple(texts)
