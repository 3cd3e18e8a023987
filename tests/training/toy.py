"""A learner that fits a line through noisy points: small, and with every kind of state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kvfold.training import Checkpoint, StepOutcome, TrainingSettings

SETTINGS = TrainingSettings(
    steps=23, learning_rate=0.05, warmup_steps=4, validate_every=5, checkpoint_every=7
)

TRUE = torch.tensor([[2.0], [-1.0], [0.5]])


class Regression:
    """Linear regression whose batches are drawn and whose baseline is a moving average."""

    criterion = "error"

    def __init__(self, *, data: str = "line", width: int = 3, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.module = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.Linear(4, 1))
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.module.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.data, self.width = data, width
        self.average = torch.zeros(())
        self.before_step: Callable[[int], None] = lambda index: None
        self.scale = 1.0
        """Of the loss."""
        self.errors: list[float] = []
        """What validation says instead of the truth, one after the other."""

    def inputs(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        points = torch.randn(16, self.width, generator=generator)
        return points, points @ TRUE[: self.width] + 0.3

    def step(self, index: int, generator: torch.Generator) -> StepOutcome:
        points, targets = self.inputs(generator)
        loss = ((self.module(points) - targets) ** 2).mean()
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        self.module.batches += 1
        self.before_step(index)
        return StepOutcome(self.scale * loss, {"average": float(self.average)})

    def validate(self) -> Mapping[str, float]:
        assert not torch.is_grad_enabled()
        assert not self.module.training
        if self.errors:
            return {"error": self.errors.pop(0)}
        points, targets = self.inputs(torch.Generator().manual_seed(99))
        error = float(((self.module(points) - targets) ** 2).mean())
        return {"error": error, "undefined": float("nan")}

    def state(self) -> Mapping[str, torch.Tensor]:
        return {"average": self.average}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.average = state["average"]

    def identity(self) -> Mapping[str, object]:
        return {"data": self.data, "range": (0, 1)}


def same_tensors(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def assert_same_run(one: Checkpoint, two: Checkpoint) -> None:
    """All but the time it took, to the last bit."""
    for name in ("step", "curve", "best_step", "best_metrics", "identity", "settings"):
        assert getattr(one, name) == getattr(two, name), name
    for name in ("module", "optimiser", "best", "extra"):
        assert same_tensors(getattr(one, name), getattr(two, name)), name


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
