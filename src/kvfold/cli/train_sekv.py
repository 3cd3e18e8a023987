"""`kvfold train sekv`: the gates of SeKV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli.checks import check_model
from kvfold.cli.console import JsonOption, note, progress
from kvfold.cli.options import DeviceOption, DtypeOption, ModelOption, listed, load, token_counts
from kvfold.cli.train_place import (
    EveryOption,
    OutOption,
    Place,
    RateOption,
    ResumeOption,
    SeedOption,
    SinksOption,
    TextsOption,
    ValidationOption,
    folder_for,
    is_main,
    progress_line,
    show_trained,
    this_command,
)
from kvfold.errors import ConfigError

if TYPE_CHECKING:
    from kvfold.training import TrainingSettings
    from kvfold.zoom.learner import ZoomSettings
    from kvfold.zoom.train import TrainedGates

_SHOWN = ("kl", "zoom", "recon", "recall", "expanded")
"""Metrics of a step that a line of progress has."""

StepsOption = Annotated[int, typer.Option(help="Updates of the gates.")]
LengthsOption = Annotated[
    str,
    typer.Option(
        help="Tokens of an excerpt, a comma between: the last for the second half of the steps, "
        "the others in equal parts of the first."
    ),
]
QueriesOption = Annotated[
    int, typer.Option(help="Positions of a text that a step asks about; half look far back.")
]
StepsATextOption = Annotated[int, typer.Option(help="Steps that a text serves once it is read.")]
FirstTextsOption = Annotated[
    int, typer.Option(help="Texts to which the gates are fitted first; 0 for random ones.")
]
FirstExpandedOption = Annotated[
    float, typer.Option(help="Share of the spans that is expanded before training.")
]
ZoomOption = Annotated[float, typer.Option(help="Weight of the loss of what is expanded.")]
ReconOption = Annotated[float, typer.Option(help="Weight of the loss of ranks left out.")]
BudgetOption = Annotated[
    float, typer.Option(help="Weight of the share that is expanded, from the middle on.")
]
WindowOption = Annotated[int, typer.Option(help="Tokens before a query that stay exact.")]
DeviationsOption = Annotated[
    float, typer.Option(help="Of surprisal above its mean, from which a token is an anchor.")
]
AnchorsOption = Annotated[float, typer.Option(help="Share of the tokens that may be anchors.")]
ShortestOption = Annotated[int, typer.Option(help="Tokens of the shortest span.")]
LongestOption = Annotated[int, typer.Option(help="Tokens of the longest span.")]


def sekv(
    model: ModelOption = "default",
    out: OutOption = "sekv-gates",
    texts: TextsOption = "default",
    steps: StepsOption = 600,
    lengths: LengthsOption = "512,1024,2048",
    queries: QueriesOption = 64,
    steps_a_text: StepsATextOption = 4,
    first_texts: FirstTextsOption = 8,
    first_expanded: FirstExpandedOption = 0.25,
    zoom: ZoomOption = 1.0,
    recon: ReconOption = 0.5,
    budget: BudgetOption = 0.1,
    sinks: SinksOption = 4,
    window: WindowOption = 32,
    deviations: DeviationsOption = 1.0,
    most_anchors: AnchorsOption = 0.01,
    shortest: ShortestOption = 8,
    longest: LongestOption = 16,
    learning_rate: RateOption = 1e-3,
    validation: ValidationOption = 8,
    every: EveryOption = 50,
    seed: SeedOption = 0,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    resume: ResumeOption = False,
    json_output: JsonOption = False,
) -> None:
    """Train the gates of SeKV: which spans a query expands, and to which rank.

    --resume goes on after an interruption.
    """
    check_model(model, dtype)
    folder = folder_for(out)
    settings, method = _settings(locals())
    where = Place(model, dtype, device, folder, resume)
    counts = _lengths(lengths, sinks + window + longest)
    where.check()
    with where.open():
        trained = _run(where, listed(texts), counts, settings, method)
    if is_main():
        _show(trained, json_output=json_output)


def _lengths(text: str, least: int) -> tuple[int, ...]:
    """The lengths of excerpts, each with room for spans."""
    counts = token_counts(text)
    if min(counts) <= least:
        raise ConfigError(
            f"excerpts of {min(counts)} tokens leave no span between the first tokens and the "
            f"window: give --lengths above {least}"
        )
    return counts


def _settings(given: Mapping[str, Any]) -> tuple[TrainingSettings, ZoomSettings]:
    """The options as settings, checked."""
    from kvfold.training import TrainingSettings
    from kvfold.zoom.learner import ZoomSettings

    settings = TrainingSettings(
        steps=given["steps"],
        learning_rate=given["learning_rate"],
        warmup_steps=given["steps"] // 10,
        seed=given["seed"],
        validate_every=given["every"],
        checkpoint_every=given["every"],
    )
    settings.check()
    method = ZoomSettings(**{field.name: given[field.name] for field in fields(ZoomSettings)})
    method.check()
    return settings, method


def _run(
    where: Place,
    texts: tuple[str, ...],
    lengths: tuple[int, ...],
    settings: TrainingSettings,
    method: ZoomSettings,
) -> TrainedGates:
    from kvfold.home import public_name
    from kvfold.training import open_corpora
    from kvfold.zoom.train import train_gates

    accelerator = where.accelerator()
    loaded, tokenizer = load(where.model, where.dtype, where.device_for(accelerator))
    corpora = open_corpora(texts, tokenizer, lengths=lengths, seed=settings.seed)
    with progress() as report:
        return train_gates(
            loaded,
            corpora,
            where.out,
            settings,
            method,
            name=public_name(where.model),
            command=this_command(),
            resume=where.resume,
            on_progress=lambda at: report(progress_line(at, _SHOWN, "loss"), at.step / at.total),
            on_preparation=report,
            accelerator=accelerator,
        )


def _show(trained: TrainedGates, *, json_output: bool) -> None:
    record, files = trained.artifact.record, {"gates": trained.gates, "picture": trained.curve}
    show_trained(files, record, title="Trained gates", json_output=json_output)
    if not json_output:
        note(f'use them: kvfold.make_cache(model, "sekv", gates="{trained.gates.parent}")')
