"""`kvfold diffuse adapt`: turn an autoregressive model into one that fills masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfold.cli.checks import check_counts, check_model
from kvfold.cli.console import JsonOption, note, progress
from kvfold.cli.diffuse_options import MaskOption
from kvfold.cli.diffuse_train import (
    HomeOption,
    PrecisionOption,
    PredictionChoice,
    folder_of,
    line,
    name_of,
    prediction_of,
    show,
    training_settings,
)
from kvfold.cli.options import DeviceOption, ModelOption, listed
from kvfold.cli.train_place import (
    EveryOption,
    Place,
    ResumeOption,
    TextsOption,
    ValidationOption,
    this_command,
)

if TYPE_CHECKING:
    from kvfold.diffusion.train import TrainedModel
    from kvfold.training import TrainingSettings

RATE, LORA_RATE = 3e-4, 1e-3
"""Learning rates by default: of all weights, and of low-rank changes."""

RateOption = Annotated[
    float | None,
    typer.Option(
        help="Of AdamW; falls by a cosine.",
        show_default=f"{RATE}, with --lora-rank {LORA_RATE}",
    ),
]
LoraOption = Annotated[
    int | None,
    typer.Option(
        help="Of low-rank changes of the layers' matrices, which then learn alone, in less memory.",
        metavar="R",
        show_default="all weights learn",
    ),
]


def adapt(
    model: ModelOption = "default",
    prediction: PredictionChoice = "shifted",
    out: HomeOption = None,
    texts: TextsOption = "reference",
    steps: Annotated[
        int, typer.Option(help="Updates of the weights; 200 are a beginning, thousands better.")
    ] = 200,
    rows: Annotated[int, typer.Option(help="Excerpts of a step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of an excerpt.")] = 64,
    lora_rank: LoraOption = None,
    learning_rate: RateOption = None,
    precision: PrecisionOption = "float32",
    validation: ValidationOption = 24,
    every: EveryOption = 50,
    mask_token_id: MaskOption = None,
    seed: Annotated[int, typer.Option(help="Of excerpts and masks.")] = 0,
    device: DeviceOption = None,
    resume: ResumeOption = False,
    json_output: JsonOption = False,
) -> None:
    """Turn an autoregressive model into a masked diffusion model, by training it on.

    `adapted` and `adapted-same` are its names for --model. --resume goes on after an interruption.
    """
    check_model(model, None)
    name = name_of("adapted", prediction, plain="shifted")
    folder = folder_of(out, name)
    check_counts(rows=rows, length=length, validation=validation)
    if lora_rank is not None:
        check_counts(lora_rank=lora_rank)
    usual = RATE if lora_rank is None else LORA_RATE
    rate = usual if learning_rate is None else learning_rate
    settings = training_settings(steps, rate, every, seed, final_share=0.1, precision=precision)
    where = Place(model, None, device, folder, resume)
    where.check()
    trained = _run(where, settings, locals())
    show(trained, name if out is None else out, json_output=json_output)


def _run(where: Place, settings: TrainingSettings, given: Mapping[str, Any]) -> TrainedModel:
    from kvfold.diffusion import train as diffusion
    from kvfold.diffusion.learner import MaskingSettings
    from kvfold.evict.train import public_name
    from kvfold.training import open_corpus

    if where.model == "default":
        from kvfold.models import ensure_default

        ensure_default(progress=note)
    subject = diffusion.open_adaptable(
        where.model,
        prediction=prediction_of(given["prediction"]),
        mask_token_id=given["mask_token_id"],
        device=where.device,
    )
    texts, length = listed(given["texts"]), given["length"]
    corpus = open_corpus(texts, subject.tokenizer, length=length, seed=settings.seed)
    with where.open(), progress() as report:
        return diffusion.adapt(
            subject,
            diffusion.CorpusLessons(corpus),
            where.out,
            settings,
            MaskingSettings(rows=given["rows"], validation=given["validation"]),
            lora_rank=given["lora_rank"],
            name=public_name(where.model),
            command=this_command(),
            resume=where.resume,
            on_progress=lambda at: report(line(at), at.step / at.total),
        )
