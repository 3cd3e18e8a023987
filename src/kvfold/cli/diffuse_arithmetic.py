"""`kvfold diffuse train-arithmetic`: a small diffusion model of additions, in minutes."""

from __future__ import annotations

from typing import Annotated

import typer

from kvfold.cli.checks import check_counts
from kvfold.cli.console import JsonOption, progress
from kvfold.cli.diffuse_train import (
    HomeOption,
    PredictionChoice,
    folder_of,
    line,
    name_of,
    prediction_of,
    show,
    training_settings,
)
from kvfold.cli.options import DeviceOption
from kvfold.cli.train_place import EveryOption, Place, RateOption, ResumeOption, this_command


def train_arithmetic(
    prediction: PredictionChoice = "same",
    out: HomeOption = None,
    steps: Annotated[int, typer.Option(help="Updates of the weights.")] = 4000,
    rows: Annotated[int, typer.Option(help="Additions of a step.")] = 64,
    learning_rate: RateOption = 2e-3,
    every: EveryOption = 250,
    problems: Annotated[int, typer.Option(help="Held-out additions of the exam.")] = 500,
    seed: Annotated[int, typer.Option(help="Of weights, additions and masks.")] = 0,
    device: DeviceOption = None,
    resume: ResumeOption = False,
    json_output: JsonOption = False,
) -> None:
    """Train a small diffusion model that adds, and examine it on additions it has not seen.

    `arithmetic` and `arithmetic-shifted` are its names for --model. --resume goes on after an
    interruption.
    """
    name = name_of("arithmetic", prediction, plain="same")
    folder = folder_of(out, name)
    check_counts(rows=rows, problems=problems)
    settings = training_settings(
        steps, learning_rate, every, seed, final_share=0.05, second_decay=0.98
    )
    where = Place(name, None, device, folder, resume)
    where.check()
    from kvfold.diffusion.learner import MaskingSettings
    from kvfold.diffusion.train import train_arithmetic as train
    from kvfold.models import parse_device

    place = parse_device(device)
    with where.open(), progress() as report:
        trained = train(
            folder,
            settings,
            MaskingSettings(rows=rows, validation=256),
            prediction=prediction_of(prediction),
            problems=problems,
            device=place,
            command=this_command(),
            resume=resume,
            on_progress=lambda at: report(line(at), at.step / at.total),
        )
    show(trained, name if out is None else out, json_output=json_output)
