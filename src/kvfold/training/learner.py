"""What the training loop asks of something that learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step found."""

    loss: torch.Tensor
    """A scalar with its graph."""
    metrics: Mapping[str, float]
    """What to show of it; the loop adds `loss`, `learning_rate` and `gradient_norm`."""


class Learner(Protocol):
    """Something that learns."""

    @property
    def module(self) -> torch.nn.Module:
        """What is trained: its parameters that want a gradient."""
        ...

    @property
    def criterion(self) -> str:
        """The entry of `validate()`, lower is better, by which the best weights are kept."""
        ...

    def step(self, index: int, generator: torch.Generator) -> StepOutcome:
        """Compute the loss of a step.

        Args:
            index: Steps done before this one.
            generator: On the CPU; all that is drawn comes from it. Processes that train
                together are given different ones.
        """
        ...

    def validate(self) -> Mapping[str, float]:
        """Measure the module as it is, the same way every time."""
        ...

    def state(self) -> Mapping[str, torch.Tensor]:
        """What else changes from step to step; a checkpoint holds that of the main process."""
        ...

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state` gave."""
        ...

    def identity(self) -> Mapping[str, object]:
        """JSON-ready facts that a resumed run must share, such as hashes of the data."""
        ...
