"""Training gates from beginning to end: the loop, then the artifact and the picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedModel

from kvfold.models import fingerprint, shape_facts
from kvfold.training import Corpus, Progress, TrainingSettings, plot_curve, train
from kvfold.training.checkpoint import find_checkpoint
from kvfold.zoom.gates_artifact import FILE, GatesArtifact
from kvfold.zoom.learner import GateLearner, ZoomSettings

CURVE = "curve.png"
"""The picture of a training run, beside the gates."""


@dataclass(frozen=True, slots=True)
class TrainedGates:
    """What training left behind."""

    artifact: GatesArtifact
    """The best gates and their record."""
    gates: Path
    """Their file."""
    curve: Path
    """The picture."""


def train_gates(
    model: PreTrainedModel,
    corpora: Sequence[Corpus],
    folder: str | Path,
    settings: TrainingSettings,
    zoom: ZoomSettings | None = None,
    *,
    name: str = "model",
    command: str = "kvfold.zoom.train_gates",
    resume: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    on_preparation: Callable[[str, float], None] | None = None,
    accelerator: Accelerator | None = None,
) -> TrainedGates:
    """Train gates for a model.

    Args:
        model: An attached model; its weights are not touched.
        corpora: Excerpts to learn from, mostly of rising length; see `GateLearner`.
        folder: Where the checkpoint, the gates and the picture go.
        settings: Of the loop.
        zoom: Of the method.
        name: The model's, as others may read it.
        command: What trains this again, for the record.
        resume: Go on with the folder's checkpoint.
        on_progress: Told about every step.
        on_preparation: Told what is done before the first step, and the share of it.
        accelerator: Of several processes that train together; the main one writes.

    Returns:
        The gates that did best on the held-out excerpts.

    Raises:
        ConfigError: For a setting that is out of its range, or a folder that holds another run.
        ArtifactError: When the checkpoint is damaged, or a file cannot be written.
        UnsupportedModelError: When gates cannot be trained for the model.
        KVFoldError: When a loss is no number.
    """
    learner = _learner(model, corpora, settings, zoom or ZoomSettings(), accelerator)
    if find_checkpoint(Path(folder), resume=resume) is None:
        learner.prepare(on_preparation)
    record = train(
        learner, settings, folder, resume=resume, on_progress=on_progress, accelerator=accelerator
    )
    told = {"command": command, **record.to_dict()}
    artifact = GatesArtifact(learner.module, name, shape_facts(model), fingerprint(model), told)
    if accelerator is None or accelerator.is_main_process:
        plot_curve(record, Path(folder) / CURVE)
        artifact.save_pretrained(folder)
    return TrainedGates(artifact, Path(folder) / FILE, Path(folder) / CURVE)


def _learner(
    model: PreTrainedModel,
    corpora: Sequence[Corpus],
    settings: TrainingSettings,
    zoom: ZoomSettings,
    accelerator: Accelerator | None,
) -> GateLearner:
    share = (
        {}
        if accelerator is None
        else {"process": accelerator.process_index, "processes": accelerator.num_processes}
    )
    return GateLearner(model, corpora, zoom, steps=settings.steps, seed=settings.seed, **share)
