"""Training diffusion models to the end: the loop, then a folder with model and record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from kvfold.artifacts import json_text, write_files
from kvfold.diffusion.arithmetic import (
    SHAPE,
    Exam,
    Sums,
    arithmetic_model,
    arithmetic_tokenizer,
)
from kvfold.diffusion.description import Config, read_config
from kvfold.diffusion.learner import Batch, Lessons, MaskedLearner, MaskingSettings
from kvfold.diffusion.model import DiffusionModel, model_folder
from kvfold.diffusion.samplers import LLaDASampler
from kvfold.diffusion.saving import llama_config, save_model
from kvfold.diffusion.shape import Prediction
from kvfold.diffusion.tokenizer import load_tokenizer
from kvfold.errors import ConfigError
from kvfold.training import Corpus, Progress, TrainingSettings, plot_curve, train
from kvfold.training.words import Split

CURVE, RECORD = "curve.png", "training.json"
"""The picture and the record of a training run, beside the model."""
EXAM_STEPS = (16, 5)
"""Steps in which the additions of the exam are written."""

OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """What training left behind."""

    model: DiffusionModel
    """With the best weights."""
    folder: Path
    """Which `DiffusionModel.from_pretrained` takes."""
    record: Mapping[str, object]
    """How it came about, as in the file."""


class CorpusLessons:
    """Excerpts of a corpus, as `MaskedLearner` takes them; every place may be masked.

    Args:
        corpus: Of excerpts of one length.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    def batch(self, index: int, rows: int, split: Split) -> Batch:
        """So many excerpts, which no other number has."""
        drawn = [self._corpus.excerpt(index * rows + row, split).tokens for row in range(rows)]
        ids = torch.stack(drawn)
        return ids, torch.ones_like(ids, dtype=torch.bool)

    def describe(self) -> Mapping[str, object]:
        """The corpus's own description."""
        return self._corpus.describe()


def train_arithmetic(
    folder: str | Path,
    settings: TrainingSettings,
    masking: MaskingSettings | None = None,
    *,
    prediction: Prediction = "same",
    problems: int = 500,
    device: torch.device | None = None,
    command: str = "kvfold.diffusion.train_arithmetic",
    resume: bool = False,
    on_progress: OnProgress | None = None,
) -> TrainedModel:
    """Train the small model of additions.

    Args:
        folder: Where checkpoint, model, record and picture go.
        settings: Of the loop.
        masking: Of the objective.
        prediction: Where tokens are predicted.
        problems: Held-out additions of the exam at the end.
        device: Where to train; the CPU without it.
        command: What trains this again, for the record.
        resume: Go on with the folder's checkpoint.
        on_progress: Told about every step.

    Raises:
        ConfigError: For a setting out of its range, or a folder that holds another run.
        ArtifactError: When the checkpoint is damaged, or a file cannot be written.
        KVFoldError: When a loss is no number.
    """
    model = arithmetic_model(prediction, seed=settings.seed, device=device)
    learner = MaskedLearner(model, Sums(settings.seed), masking or MaskingSettings(rows=64))

    return _train(
        learner,
        Path(folder),
        settings,
        config=llama_config(SHAPE),
        tokenizer=arithmetic_tokenizer(),
        told={"command": command},
        exam=lambda: _examine(model, problems),
        resume=resume,
        on_progress=on_progress,
    )


def _examine(model: DiffusionModel, problems: int) -> Mapping[str, object]:
    exam = Exam.draw(problems)
    right = {steps: exam.take(model, "none", LLaDASampler(steps=steps)) for steps in EXAM_STEPS}
    return {"problems": problems, "right_by_steps": {str(s): share for s, share in right.items()}}


@dataclass(frozen=True, slots=True)
class Adaptable:
    """An autoregressive model that is to fill masks."""

    model: DiffusionModel
    """Its weights in our decoder."""
    config: Config
    """Its config.json."""
    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer."""


def open_adaptable(
    name: str | Path,
    *,
    prediction: Prediction = "shifted",
    mask_token_id: int | None = None,
    device: str | torch.device | None = None,
) -> Adaptable:
    """Load a model that is to be adapted, in float32.

    Args:
        name: `default`, a folder or a name on the Hub.
        prediction: Where tokens shall be predicted; a model that predicts the next token does
            `shifted`, in a way, already.
        mask_token_id: Token that shall stand for an undecided one; without it the tokenizer's mask
            token, else the last special token that has no part of its own.
        device: By default CUDA where there is one, else the CPU.

    Raises:
        ConfigError: There is no such model, or no token to spare for the mask.
        ArtifactError: Its files are damaged.
        UnsupportedModelError: It has a setting that our decoder does not know.
    """
    tokenizer = load_tokenizer(name)
    config = read_config(model_folder(name))
    mask = spare_token(tokenizer) if mask_token_id is None else mask_token_id
    model = DiffusionModel.from_pretrained(
        name, dtype=torch.float32, device=device, mask_token_id=mask, prediction=prediction
    )
    if isinstance(end := tokenizer.eos_token_id, int):
        model.traits = replace(model.traits, eos_ids=model.traits.eos_ids | {end})
    return Adaptable(model, config, tokenizer)


def spare_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token that can stand for an undecided one.

    Raises:
        ConfigError: There is none.
    """
    if isinstance(mask := tokenizer.mask_token_id, int):
        return mask
    busy = set(tokenizer.special_tokens_map.values())
    template = tokenizer.chat_template or ""
    spare = [
        index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content not in busy and token.content not in template
    ]
    if not spare:
        raise ConfigError(
            "the tokenizer has no special token to spare for the mask: give --mask-token-id, a "
            "token that texts do not hold"
        )
    return max(spare)


def adapt(
    subject: Adaptable,
    lessons: Lessons,
    folder: str | Path,
    settings: TrainingSettings,
    masking: MaskingSettings | None = None,
    *,
    lora_rank: int | None = None,
    name: str = "model",
    command: str = "kvfold.diffusion.adapt",
    resume: bool = False,
    on_progress: OnProgress | None = None,
) -> TrainedModel:
    """Turn an autoregressive model into one that fills masks.

    Args:
        subject: From `open_adaptable`; its weights change.
        lessons: What is learnt from, such as `CorpusLessons`.
        folder: Where checkpoint, model, record and picture go.
        settings: Of the loop.
        masking: Of the objective.
        lora_rank: Of low-rank changes of the layers' matrices, to learn these alone.
        name: The model's, as others may read it.
        command: What trains this again, for the record.
        resume: Go on with the folder's checkpoint.
        on_progress: Told about every step.

    Raises:
        ConfigError: For a setting out of its range, or a folder that holds another run.
        ArtifactError: When the checkpoint is damaged, or a file cannot be written.
        KVFoldError: When a loss is no number.
    """
    learner = MaskedLearner(
        subject.model,
        lessons,
        masking or MaskingSettings(),
        lora_rank=lora_rank,
        seed=settings.seed,
    )
    return _train(
        learner,
        Path(folder),
        settings,
        config=subject.config,
        tokenizer=subject.tokenizer,
        told={"command": command, "adapted_from": name},
        exam=dict,
        resume=resume,
        on_progress=on_progress,
    )


def _train(
    learner: MaskedLearner,
    folder: Path,
    settings: TrainingSettings,
    *,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    told: Mapping[str, object],
    exam: Callable[[], Mapping[str, object]],
    resume: bool,
    on_progress: OnProgress | None,
) -> TrainedModel:
    model = learner.model
    with learner.learning():
        done = train(learner, settings, folder, resume=resume, on_progress=on_progress)
    # The picture has every step.
    curve = [point for point in done.curve if point["validation"]]
    record = {**told, **exam(), **done.to_dict(), "curve": curve}
    text = json_text(record)
    plot_curve(done, folder / CURVE)
    write_files(folder, {RECORD: lambda path: path.write_text(text, encoding="utf-8")})
    save_model(model, folder, config, tokenizer)
    return TrainedModel(model, folder, record)
