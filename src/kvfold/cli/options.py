"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli.checks import check_counts
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ModelOption = Annotated[
    str, typer.Option("--model", help="`default`, a model's folder, or a Hub name.")
]
BudgetOption = Annotated[
    str | None,
    typer.Option(
        help="What may be kept: a share (0.25, 25%), tokens (512) or bytes (64MiB); sekv takes a "
        "share.",
        show_default="0.25",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="Of the weights: float32, bfloat16, float16.", show_default="float32 on CPU"),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1, mps.", show_default="cuda if there is one, else cpu"),
]
ChunkOption = Annotated[
    int | None,
    typer.Option(
        help="Read the prompt in pieces of so many tokens, evicting after each.",
        show_default="all at once",
    ),
]


def listed(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list."""
    return tuple(name for name in (part.strip() for part in text.split(",")) if name)


def token_counts(text: str) -> tuple[int, ...]:
    """The numbers of tokens in the comma-separated list of `--lengths`.

    Raises:
        ConfigError: When there is none, or something else among them.
    """
    parts = listed(text)
    if not parts or not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--lengths {text!r}: give numbers of tokens such as 256,512")
    return tuple(map(int, parts))


def distinct_counts(text: str) -> tuple[int, ...]:
    """The numbers of tokens in a list of `--lengths` in which each stands once.

    Raises:
        ConfigError: When there is none, one twice, one that is 0, or something else among them.
    """
    found = token_counts(text)
    if len(set(found)) < len(found):
        raise ConfigError(f"--lengths {text!r} has a length twice: give each once")
    check_counts(lengths=min(found))
    return found


def load(
    name: str, dtype: str | None, device: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load and attach a model, saying on standard error what is fetched."""
    from kvfold.attention import attach
    from kvfold.cli.console import note
    from kvfold.models import load_model

    model, tokenizer = load_model(name, dtype=dtype, device=device, progress=note)
    attach(model)
    return model, tokenizer
