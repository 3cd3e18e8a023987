"""Teaching a specialist from beginning to end: the loop, then the adapter and the picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedModel

from kvfold.models import fingerprint, shape_facts
from kvfold.models.adapter import FILE, AdapterArtifact
from kvfold.training import Corpus, Progress, TrainingSettings, plot_curve, train
from kvfold.transfer.specialist import SpecialistLearner, SpecialistSettings

CURVE = "curve.png"
"""The picture of a training run, beside the adapter."""


@dataclass(frozen=True, slots=True)
class Specialised:
    """What training left behind."""

    artifact: AdapterArtifact
    """The best changes and their record."""
    adapter: Path
    """Their file."""
    curve: Path
    """The picture."""


def specialise(
    model: PreTrainedModel,
    corpora: Sequence[Corpus],
    folder: str | Path,
    settings: TrainingSettings,
    specialist: SpecialistSettings | None = None,
    *,
    name: str,
    command: str = "kvfold.transfer.specialise",
    resume: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    accelerator: Accelerator | None = None,
) -> Specialised:
    """Teach a model a task by low-rank changes of its weights.

    Args:
        model: Not attached; its linear layers are wrapped, its weights are not touched.
        corpora: Excerpts to learn from, of one length each; see `SpecialistLearner`.
        folder: Where the checkpoint, the adapter and the picture go.
        settings: Of the loop.
        specialist: Of the method.
        name: What the model is loaded by, when the adapter is.
        command: What trains this again, for the record.
        resume: Go on with the folder's checkpoint.
        on_progress: Told about every step.
        accelerator: Of several processes that train together; the main one writes.

    Returns:
        The changes that did best on the held-out excerpts.

    Raises:
        ConfigError: For a setting that is out of its range, or a folder that holds another run.
        ArtifactError: When the checkpoint is damaged, or a file cannot be written.
        KVFoldError: When a loss is no number.
    """
    facts, seal = shape_facts(model), fingerprint(model)
    share = _share(accelerator)
    method = specialist or SpecialistSettings()
    learner = SpecialistLearner(model, corpora, method, seed=settings.seed, **share)
    record = train(
        learner, settings, folder, resume=resume, on_progress=on_progress, accelerator=accelerator
    )
    told = {"command": command, **record.to_dict()}
    artifact = AdapterArtifact(learner.changes(), learner.scale, name, facts, seal, told)
    if accelerator is None or accelerator.is_main_process:
        plot_curve(record, Path(folder) / CURVE)
        artifact.save_pretrained(folder)
    return Specialised(artifact, Path(folder) / FILE, Path(folder) / CURVE)


def _share(accelerator: Accelerator | None) -> dict[str, int]:
    """Which of the processes that train together this is."""
    if accelerator is None:
        return {}
    return {"process": accelerator.process_index, "processes": accelerator.num_processes}
