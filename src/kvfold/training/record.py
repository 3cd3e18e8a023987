"""What a training run says of itself, while it goes on and when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kvfold.training.checkpoint import Metrics, Point
from kvfold.training.settings import TrainingSettings


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands."""

    step: int
    """Steps done; 0 after the first validation."""
    total: int
    """Steps of the run."""
    metrics: Metrics
    """Of the step."""
    validation: Metrics
    """After the step; empty where nothing was validated."""
    seconds_left: float | None
    """Estimate from the steps of this session; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """How a module came about."""

    settings: TrainingSettings
    """What the run was asked to do."""
    identity: Mapping[str, object]
    """What the learner said of itself and its data."""
    environment: Mapping[str, object]
    """What the last session ran on."""
    seconds: float
    """Time it took, over all sessions."""
    steps: int
    """Steps done."""
    criterion: str
    """Metric, lower is better, by which the best weights were chosen."""
    best_step: int
    """Steps after which they were reached."""
    best_metrics: Metrics
    """Their validation."""
    curve: list[Point]
    """All that was measured, in order."""

    def to_dict(self) -> dict[str, object]:
        """The record as plain data."""
        return asdict(self)
