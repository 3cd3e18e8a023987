"""Training a policy from beginning to end: the loop, then the artifact and the picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from accelerate import Accelerator
from transformers import PreTrainedModel

from kvfold.evict.artifact import FILE, PolicyArtifact
from kvfold.evict.learner import DistillSettings, PolicyLearner
from kvfold.home import public_name
from kvfold.models import shape_facts
from kvfold.training import Corpus, Progress, TrainingSettings, plot_curve, train
from kvfold.training.checkpoint import find_checkpoint

CURVE = "curve.png"
"""The picture of a training run, beside the policy."""


@dataclass(frozen=True, slots=True)
class TrainedPolicy:
    """What training left behind."""

    artifact: PolicyArtifact
    """The best policy and its record."""
    policy: Path
    """Its file."""
    curve: Path
    """The picture."""


def train_policy(
    model: PreTrainedModel,
    corpus: Corpus,
    folder: str | Path,
    settings: TrainingSettings,
    distill: DistillSettings | None = None,
    *,
    name: str = "model",
    command: str = "kvfold.evict.train_policy",
    resume: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    on_preparation: Callable[[str, float], None] | None = None,
    accelerator: Accelerator | None = None,
) -> TrainedPolicy:
    """Train a policy for a model.

    Args:
        model: An attached model; its weights are not touched.
        corpus: Excerpts of prompt and continuation.
        folder: Where the checkpoint, the policy and the picture go.
        settings: Of the loop.
        distill: Of the method.
        name: What the model was loaded by; of a folder the last part is recorded.
        command: What trains this again, for the record.
        resume: Go on with the folder's checkpoint.
        on_progress: Told about every step, with its `tokens_per_second` among the metrics: the
            continuation tokens of all rollouts.
        on_preparation: Told what is done before the first step, and the share of it.
        accelerator: Of several processes that train together; the main one writes.

    Returns:
        The policy that did best on the held-out excerpts.

    Raises:
        ConfigError: For a setting that is out of its range, or a folder that holds another run.
        ArtifactError: When the checkpoint is damaged, or a file cannot be written.
        KVFoldError: When a loss is no number.
    """
    learner = _learner(model, corpus, distill, settings.seed, accelerator)
    if find_checkpoint(Path(folder), resume=resume) is None:
        learner.prepare(on_preparation)
    how = {"resume": resume, "on_progress": _with_speed(learner, on_progress)}
    record = train(learner, settings, folder, accelerator=accelerator, **how)
    facts, told = shape_facts(model), {"command": command, **record.to_dict()}
    artifact = PolicyArtifact(learner.module, learner.importance, public_name(name), facts, told)
    if accelerator is None or accelerator.is_main_process:
        plot_curve(record, Path(folder) / CURVE)
        artifact.save_pretrained(folder)
    return TrainedPolicy(artifact, Path(folder) / FILE, Path(folder) / CURVE)


def _learner(
    model: PreTrainedModel,
    corpus: Corpus,
    distill: DistillSettings | None,
    seed: int,
    accelerator: Accelerator | None,
) -> PolicyLearner:
    share = (
        {}
        if accelerator is None
        else {"process": accelerator.process_index, "processes": accelerator.num_processes}
    )
    return PolicyLearner(model, corpus, distill or DistillSettings(), seed=seed, **share)


def _with_speed(
    learner: PolicyLearner, on_progress: Callable[[Progress], None] | None
) -> Callable[[Progress], None] | None:
    if on_progress is None:
        return None

    def report(at: Progress) -> None:
        speed = {"tokens_per_second": learner.tokens_per_second} if at.metrics else {}
        on_progress(replace(at, metrics=at.metrics | speed))

    return report
