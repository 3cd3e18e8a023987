"""`kvfold transfer specialise`: from a base model to a specialist, as a small adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli.checks import check_model
from kvfold.cli.console import JsonOption, note, progress
from kvfold.cli.options import DeviceOption, DtypeOption, ModelOption, distinct_counts, listed
from kvfold.cli.train_place import (
    EveryOption,
    OutOption,
    Place,
    RateOption,
    ResumeOption,
    SeedOption,
    TextsOption,
    ValidationOption,
    folder_for,
    is_main,
    progress_line,
    show_trained,
    this_command,
)

if TYPE_CHECKING:
    from kvfold.training import TrainingSettings
    from kvfold.transfer.specialise import Specialised
    from kvfold.transfer.specialist import SpecialistSettings

_SHOWN = ("loss", "right", "length")
"""Metrics of a step that a line of progress has."""

StepsOption = Annotated[int, typer.Option(help="Updates of the adapter.")]
LengthsOption = Annotated[
    str, typer.Option(help="Tokens of an excerpt, a comma between: each as often as it is short.")
]
StepTokensOption = Annotated[int, typer.Option(help="Tokens of the excerpts of a step.")]
RankOption = Annotated[int, typer.Option(help="Of the change of every linear layer.")]
AlphaOption = Annotated[
    float, typer.Option(help="A change is multiplied by it and divided by its rank.")
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="What forwards run in: float32, or bfloat16 (autocast), slow on a CPU without "
        "instructions for it."
    ),
]


def specialise(
    model: ModelOption = "default",
    out: OutOption = "kvfold-specialist",
    texts: TextsOption = "records",
    steps: StepsOption = 150,
    lengths: LengthsOption = "256,512,1024",
    step_tokens: StepTokensOption = 1024,
    rank: RankOption = 16,
    alpha: AlphaOption = 32.0,
    learning_rate: RateOption = 1e-3,
    validation: ValidationOption = 12,
    every: EveryOption = 50,
    precision: PrecisionOption = "float32",
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    resume: ResumeOption = False,
    json_output: JsonOption = False,
) -> None:
    """Teach a base model a task: by default, to answer questions about records in a terse form.

    What is learnt is an adapter of a few megabytes; its folder can be named as a model everywhere.
    --resume goes on after an interruption.
    """
    check_model(model, dtype)
    folder = folder_for(out)
    counts = distinct_counts(lengths)
    settings, method = _settings(locals())
    where = Place(_loadable(model), dtype, device, folder, resume)
    where.check()
    with where.open():
        trained = _run(where, listed(texts), counts, settings, method)
    if is_main():
        _show(trained, json_output=json_output)


def _loadable(model: str) -> str:
    """A model's name as an adapter keeps it: of a folder, from wherever it is read."""
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _settings(given: Mapping[str, Any]) -> tuple[TrainingSettings, SpecialistSettings]:
    """The options as settings, checked."""
    from kvfold.training import TrainingSettings
    from kvfold.transfer.specialist import SpecialistSettings

    settings = TrainingSettings(
        steps=given["steps"],
        learning_rate=given["learning_rate"],
        warmup_steps=given["steps"] // 20,
        seed=given["seed"],
        validate_every=given["every"],
        checkpoint_every=given["every"],
        precision=given["precision"],
    )
    settings.check()
    own = {field.name: given[field.name] for field in fields(SpecialistSettings)}
    method = SpecialistSettings(**own)
    method.check()
    return settings, method


def _run(
    where: Place,
    texts: tuple[str, ...],
    lengths: tuple[int, ...],
    settings: TrainingSettings,
    method: SpecialistSettings,
) -> Specialised:
    from kvfold.models import load_model
    from kvfold.training import open_corpora
    from kvfold.transfer.specialise import specialise as teach

    accelerator = where.accelerator()
    device = where.device_for(accelerator)
    # Not attached: kvfold's attention is for caches, and training needs none.
    loaded, tokenizer = load_model(where.model, dtype=where.dtype, device=device, progress=note)
    corpora = open_corpora(texts, tokenizer, lengths=lengths, seed=settings.seed)
    with progress() as report:
        return teach(
            loaded,
            corpora,
            where.out,
            settings,
            method,
            name=where.model,
            command=this_command(),
            resume=where.resume,
            on_progress=lambda at: report(progress_line(at, _SHOWN, "loss"), at.step / at.total),
            accelerator=accelerator,
        )


def _show(trained: Specialised, *, json_output: bool) -> None:
    record, files = trained.artifact.record, {"adapter": trained.adapter, "picture": trained.curve}
    show_trained(files, record, title="Trained specialist", json_output=json_output)
    if not json_output:
        note(f"use it: kvfold transfer calibrate {trained.artifact.base} {trained.adapter.parent}")
