"""What the commands that make diffusion models share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvfold.cli.checks import check_counts
from kvfold.cli.console import facts, note, print_json, stdout
from kvfold.cli.files import output_folder
from kvfold.cli.train_place import progress_line
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from kvfold.diffusion.train import TrainedModel
    from kvfold.training import Progress, TrainingSettings

PredictionChoice = Annotated[
    str, typer.Option("--prediction", help="Where a token is predicted: same place, or shifted.")
]
HomeOption = Annotated[
    str | None,
    typer.Option(
        "--out",
        help="Folder of checkpoint, model, record and picture.",
        metavar="DIR",
        show_default="the user's folder, where the model is found by name",
    ),
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        help="Of the forwards: float32 or bfloat16, which some CPUs are slow at; the weights "
        "that learn are float32.",
    ),
]


def name_of(base: str, prediction: str, *, plain: str) -> str:
    """The name by which the model will be found: the base, or with the prediction after it.

    Raises:
        ConfigError: There is no such prediction.
    """
    if prediction not in ("same", "shifted"):
        raise ConfigError(f"--prediction {prediction!r}: give same or shifted")
    return base if prediction == plain else f"{base}-{prediction}"


def prediction_of(text: str) -> Literal["same", "shifted"]:
    """The same, as a type knows it."""
    return "same" if text == "same" else "shifted"


def folder_of(out: str | None, name: str) -> Path:
    """Where a run goes, if that can be written to."""
    from kvfold.diffusion.own import own_home

    return output_folder(str(own_home(name)) if out is None else out)


def training_settings(
    steps: int,
    learning_rate: float,
    every: int,
    seed: int,
    *,
    final_share: float,
    precision: str = "float32",
    second_decay: float = 0.999,
) -> TrainingSettings:
    """Settings of the loop, checked.

    Raises:
        ConfigError: Naming the option that is out of its range.
    """
    from kvfold.training import TrainingSettings

    check_counts(steps=steps, every=every)
    settings = TrainingSettings(
        steps=steps,
        learning_rate=learning_rate,
        second_decay=second_decay,
        warmup_steps=min(100, steps // 10),
        final_share=final_share,
        seed=seed,
        validate_every=every,
        checkpoint_every=every,
        precision="bfloat16" if precision == "bfloat16" else "float32",
    )
    settings.check()
    if precision not in ("float32", "bfloat16"):
        raise ConfigError(f"--precision {precision!r}: give float32 or bfloat16")
    return settings


def line(at: Progress) -> str:
    """One line on where a run stands."""
    return progress_line(at, ("loss", "right"), "loss")


def show(trained: TrainedModel, model: str, *, json_output: bool) -> None:
    """Say what was made, and how to use it.

    Args:
        trained: What training left behind.
        model: What `--model` takes to use it.
        json_output: As one JSON document.
    """
    record = trained.record
    if json_output:
        print_json({"folder": str(trained.folder), "model": model, **record})
        return
    best, right = record["best_metrics"], record.get("right_by_steps")
    assert isinstance(best, dict)
    told = {"folder": trained.folder, "best after": f"{record['best_step']} steps"}
    told |= {name: f"{value:.3f}" for name, value in best.items()}
    if isinstance(right, dict):
        told |= {f"right in {steps} steps": f"{share:.1%}" for steps, share in right.items()}
    stdout().print(facts(told, title="Trained model"))
    note(f"use it: kvfold diffuse generate --model {model}")
