"""The loop shared by everything that learns: AdamW, cosine schedule, validation, checkpoints.

Each step draws from a generator of its own, seeded by the run's seed and the step's number, so
that a resumed run is the uninterrupted one bit for bit.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from kvfold.artifacts import write_files
from kvfold.environment import environment
from kvfold.errors import ConfigError, KVFoldError
from kvfold.training.checkpoint import (
    Checkpoint,
    Metrics,
    Point,
    copied,
    find_checkpoint,
    load_optimiser_state,
    optimiser_state,
    require_same_run,
    versions,
    write_checkpoint,
)
from kvfold.training.learner import Learner
from kvfold.training.record import Progress, TrainingRecord
from kvfold.training.settings import TrainingSettings

_LOGGER = logging.getLogger(__name__)


def train(
    learner: Learner,
    settings: TrainingSettings,
    folder: str | Path,
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
    accelerator: Accelerator | None = None,
) -> TrainingRecord:
    """Train a learner's module and leave the weights of its best validation in it.

    Args:
        learner: What learns; its module is trained where it is.
        settings: How.
        folder: Where `checkpoint.safetensors` is kept; it is made if it is missing.
        resume: Go on with the checkpoint that is there.
        on_progress: Called after the first validation and after every step.
        accelerator: Of several processes that train together, each on its share: gradients are
            averaged over them and the main one writes.

    Returns:
        The record of the whole run, the sessions before this one included.

    Raises:
        ConfigError: When a setting is out of its range, the folder holds a checkpoint that is
            not to be resumed or files but none to resume, or the checkpoint has other settings.
        ArtifactError: When the checkpoint is damaged or of another run, or cannot be written.
        KVFoldError: When a loss, gradient or criterion is not a finite number; the checkpoint of
            the step before is written first, as it is on any interruption.

    Example:
        >>> from kvfold.training import TrainingSettings, train
        >>> record = train(learner, TrainingSettings(steps=1000), "runs/first")  # doctest: +SKIP
    """
    settings.check()
    run = _Run(learner, settings, Path(folder), accelerator)
    found = find_checkpoint(run.folder, resume=resume)
    if found is not None:
        run.restore(found)
    write_files(run.folder, {})
    run.go(on_progress)
    return run.finish()


def step_generator(seed: int, index: int, process: int = 0) -> torch.Generator:
    """The generator that a step draws from, on the CPU.

    Args:
        seed: That of the run.
        index: Steps done before it.
        process: Which of the processes that train together.
    """
    digest = hashlib.sha256(f"{seed} {index} {process}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


class _Run:
    """A run from its first step, or from a checkpoint, to its last."""

    def __init__(
        self,
        learner: Learner,
        settings: TrainingSettings,
        folder: Path,
        accelerator: Accelerator | None,
    ) -> None:
        self.learner, self.settings, self.folder = learner, settings, folder
        self.accelerator = accelerator
        self.identity = dict(learner.identity())
        self.parameters = [p for p in learner.module.parameters() if p.requires_grad]
        if not self.parameters:
            raise ConfigError("the module has no parameters that want a gradient: nothing to train")
        self.optimiser = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=(0.9, settings.second_decay),
            weight_decay=settings.weight_decay,
        )
        self.curve: list[Point] = []
        self.last: Checkpoint | None = None
        self.best: tuple[Point, dict[str, torch.Tensor]] | None = None
        self.saved = self.first = 0
        self.seconds_before, self.started = 0.0, time.monotonic()

    @property
    def done(self) -> int:
        return self.curve[-1]["step"] if self.curve else 0

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def restore(self, found: Checkpoint) -> None:
        module = self.learner.module
        settings = self.settings.to_dict()
        require_same_run(found, identity=self.identity, settings=settings, module=module)
        if found.versions != versions():
            _LOGGER.warning("goes on with %s what %s began", versions(), found.versions)
        module.load_state_dict(found.module)
        load_optimiser_state(self.optimiser, module, found.optimiser)
        self.learner.load_state(found.extra)
        self.curve, self.last = list(found.curve), found
        best = next(p for p in found.curve if p["step"] == found.best_step)
        self.best = (best, found.best)
        self.saved = self.first = found.step
        self.seconds_before = found.seconds

    def go(self, on_progress: Callable[[Progress], None] | None) -> None:
        try:
            if not self.curve:
                self.begin()
                self.report(on_progress)
            while self.done < self.settings.steps:
                self.advance()
                self.report(on_progress)
        except BaseException:
            self.save()
            raise

    def begin(self) -> None:
        if self.accelerator is not None:
            for tensor in self.learner.module.state_dict().values():
                broadcast(tensor)
        self.record({"step": 0, "train": {}, "validation": self.validate(0)})

    def advance(self) -> None:
        step, settings = self.done + 1, self.settings
        metrics = self.learn(step)
        due = step % settings.validate_every == 0 or step == settings.steps
        validation = self.validate(step) if due else {}
        self.record({"step": step, "train": metrics, "validation": validation})
        # A whole copy, so that an interruption at any instant leaves a step to go back to.
        self.last = self.snapshot()
        if step % settings.checkpoint_every == 0 or step == settings.steps:
            self.save()

    def learn(self, step: int) -> Metrics:
        module, rate = self.learner.module.train(), self.settings.learning_rate_at(step - 1)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad()
        with self.precision():
            outcome = self.learner.step(step - 1, self.generator(step - 1))
        outcome.loss.backward()
        loss = self.average(outcome.loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.gradient_clip))
        _require_finite("loss", loss, step)
        _require_finite("norm of the gradient", norm, step)
        self.optimiser.step()
        own = {"loss": loss, "learning_rate": rate, "gradient_norm": norm}
        module.eval()
        return _metrics({**outcome.metrics, **own})

    def average(self, loss: torch.Tensor) -> float:
        """Make all processes' gradients their mean; returns the mean loss."""
        if self.accelerator is None:
            return float(loss)
        gradients = [
            p.grad if p.grad is not None else p.new_zeros(p.shape) for p in self.parameters
        ]
        device = gradients[0].device
        flat = torch.cat([loss.to(device).reshape(1), *(g.reshape(-1) for g in gradients)])
        mean = self.accelerator.reduce(flat, reduction="mean")
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, mean[1:].split(sizes), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
        return float(mean[0])

    def validate(self, step: int) -> Metrics:
        self.learner.module.eval()
        with torch.no_grad(), self.precision():
            found = dict(self.learner.validate())
        criterion = self.learner.criterion
        if criterion not in found:
            raise ConfigError(
                f"the validation gave {', '.join(found) or 'nothing'} but not its criterion "
                f"{criterion}: name one of what it gives"
            )
        _require_finite(f"validation's {criterion}", found[criterion], step)
        return _metrics(found)

    def record(self, point: Point) -> None:
        criterion = self.learner.criterion
        value = point["validation"].get(criterion)
        best = self.best[0]["validation"][criterion] if self.best else None
        if value is not None and (best is None or value < best):
            self.best = (point, copied(self.learner.module.state_dict()))
        self.curve.append(point)

    def snapshot(self) -> Checkpoint:
        assert self.best is not None  # the validation before the first step
        point, best = self.best
        return Checkpoint(
            step=self.done,
            seconds=self.seconds,
            curve=list(self.curve),
            best_step=point["step"],
            best_metrics=point["validation"],
            identity=self.identity,
            settings=self.settings.to_dict(),
            versions=versions(),
            module=copied(self.learner.module.state_dict()),
            optimiser=optimiser_state(self.optimiser, self.learner.module),
            best=best,
            extra=copied(self.learner.state()),
        )

    def save(self) -> None:
        """Write the last whole step, unless it is on disk."""
        is_main = self.accelerator is None or self.accelerator.is_main_process
        if is_main and self.last is not None and self.last.step > self.saved:
            write_checkpoint(self.last, self.folder)
            self.saved = self.last.step

    def report(self, on_progress: Callable[[Progress], None] | None) -> None:
        if on_progress is None:
            return
        point, total, here = self.curve[-1], self.settings.steps, self.done - self.first
        elapsed = time.monotonic() - self.started
        left = elapsed / here * (total - self.done) if here else None
        on_progress(Progress(point["step"], total, point["train"], point["validation"], left))

    def precision(self) -> AbstractContextManager[object]:
        device = self.parameters[0].device.type
        enabled = self.settings.precision == "bfloat16"
        return torch.autocast(device, dtype=torch.bfloat16, enabled=enabled)

    def generator(self, index: int) -> torch.Generator:
        process = 0 if self.accelerator is None else self.accelerator.process_index
        return step_generator(self.settings.seed, index, process)

    def finish(self) -> TrainingRecord:
        assert self.best is not None
        point, best = self.best
        self.learner.module.load_state_dict(best)
        self.learner.module.eval()
        return TrainingRecord(
            settings=self.settings,
            identity=self.identity,
            environment=environment(),
            seconds=self.seconds,
            steps=self.done,
            criterion=self.learner.criterion,
            best_step=point["step"],
            best_metrics=point["validation"],
            curve=self.curve,
        )


def _metrics(values: Mapping[str, float]) -> Metrics:
    return {name: float(value) if math.isfinite(value) else None for name, value in values.items()}


def _require_finite(name: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise KVFoldError(
            f"the {name} is {value} at step {step}: start in another folder with a lower learning "
            "rate or other data"
        )
