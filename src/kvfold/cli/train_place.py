"""What the commands of `kvfold train` share: their options, and where a run goes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfold.cli.console import facts, note, print_json, stdout
from kvfold.cli.files import output_folder

if TYPE_CHECKING:
    from accelerate import Accelerator

    from kvfold.training import Progress

OutOption = Annotated[
    str, typer.Option(help="Folder of checkpoint, what is learnt, and picture.", metavar="DIR")
]
TextsOption = Annotated[
    str,
    typer.Option(
        help="What to train on, a comma between several: text files, .jsonl files "
        "(file.jsonl:field), folders, data sets (hf:name/config:split:field), or the built-in "
        "`default`, `reference`, `retrieval`, `arithmetic`, `records`, `quiz`; a weight may follow "
        "each, as in default=3."
    ),
]
SinksOption = Annotated[int, typer.Option(help="First tokens that always stay.")]
RateOption = Annotated[float, typer.Option(help="Of AdamW; falls by a cosine.")]
ValidationOption = Annotated[int, typer.Option(help="Held-out excerpts of a validation.")]
EveryOption = Annotated[int, typer.Option(help="Steps between validations and checkpoints.")]
SeedOption = Annotated[int, typer.Option(help="Of weights, texts and draws.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")]


@dataclass(frozen=True, slots=True)
class Place:
    """What is trained for, and where it goes."""

    model: str
    """As it was named."""
    dtype: str | None
    """Of the weights."""
    device: str | None
    """Where to."""
    out: Path
    """The folder."""
    resume: bool
    """Whether to go on with what is there."""

    def check(self) -> None:
        """Refuse a folder that holds another run, or none to resume."""
        from kvfold.training.checkpoint import find_checkpoint

        find_checkpoint(self.out, resume=self.resume)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Say, when what is done inside is interrupted, how to go on with it."""
        from kvfold.training.checkpoint import CHECKPOINT

        try:
            yield
        except KeyboardInterrupt:
            if (self.out / CHECKPOINT).exists():
                how = "the same command with --resume goes on with it"
                note(f"{self.out} holds the run so far: {how}")
            raise

    def accelerator(self) -> Accelerator | None:
        """What processes that train together share; None for one alone."""
        from accelerate import Accelerator, PartialState

        return Accelerator() if PartialState().num_processes > 1 else None

    def device_for(self, accelerator: Accelerator | None) -> str | None:
        """Where this process trains."""
        return self.device if accelerator is None else str(accelerator.device)


def folder_for(out: str) -> Path:
    """The folder that was named, if it can be written to; it is left as it was."""
    # One process checks: those of `accelerate launch` would meet in the folder tried and removed.
    return output_folder(out) if is_main() else Path(out)


def is_main() -> bool:
    """Whether this is the only process, or the first of those of `accelerate launch`."""
    return os.environ.get("RANK", "0") == "0"


def this_command() -> str:
    """What trains the same again; it leaves out where to, which is nobody else's."""
    words, given = ["kvfold"], iter(sys.argv[1:])
    for word in given:
        if word == "--out":
            next(given, None)
        elif not word.startswith("--out="):
            words.append(word)
    return shlex.join(words)


def progress_line(at: Progress, shown: Sequence[str], judged: str) -> str:
    """One line on where a run stands.

    Args:
        at: Where.
        shown: Metrics of a step.
        judged: The metric of a validation.
    """
    parts = [f"{name} {at.metrics[name]:.3g}" for name in shown if name in at.metrics]
    if at.validation:
        parts.append(f"validation {judged} {at.validation[judged]:.3f}")
    left = "" if at.seconds_left is None else f", {at.seconds_left / 60:.0f} min left"
    return f"step {at.step} of {at.total}: {', '.join(parts)}{left}"


def show_trained(
    files: Mapping[str, Path], record: Mapping[str, object], *, title: str, json_output: bool
) -> None:
    """Say where what was learnt is, and how good it was found to be.

    Args:
        files: By what they hold.
        record: Of the training.
        title: Of the table.
        json_output: Print files and record as JSON instead.
    """
    if json_output:
        print_json({**{name: str(path) for name, path in files.items()}, **record})
        return
    best = record["best_metrics"]
    assert isinstance(best, dict)
    stdout().print(
        facts(
            {
                **files,
                "best after": f"{record['best_step']} steps",
                **{name: f"{value:.3f}" for name, value in best.items()},
            },
            title=title,
        )
    )
