"""What a training run is asked to do, and the learning rate that follows from it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

from kvfold.errors import ConfigError

Precision = Literal["float32", "bfloat16"]
"""What forwards run in; bfloat16 is torch's autocast, the weights learned stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How a module is trained. `kvfold.training.train` checks the values."""

    steps: int
    """Updates of the weights; the schedule ends with them."""
    learning_rate: float = 3e-4
    """The highest, reached after the warm-up."""
    weight_decay: float = 0.01
    """AdamW's, on all weights."""
    second_decay: float = 0.999
    """AdamW's, of the mean of squared gradients; less lets small models find a rule sooner."""
    warmup_steps: int = 0
    """First steps, over which the learning rate rises linearly."""
    final_share: float = 0.0
    """Share of the learning rate to which the cosine falls."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient of all weights together; longer ones are scaled down."""
    seed: int = 0
    """Of every step's generator, together with the step's number."""
    validate_every: int = 50
    """Steps between validations; one more comes before the first step and after the last."""
    checkpoint_every: int = 50
    """Steps between checkpoints; one more comes after the last step or an interruption."""
    precision: Precision = "float32"
    """What forwards run in."""

    def to_dict(self) -> dict[str, object]:
        """The settings as plain data."""
        return asdict(self)

    def check(self) -> None:
        """Refuse what cannot be trained with.

        Raises:
            ConfigError: When a value is out of its range.
        """
        conditions = (
            ("steps", _is_whole(self.steps, 1), "a whole number, at least 1"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "a number above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("second_decay", 0 <= self.second_decay < 1, "a number from 0, below 1"),
            ("warmup_steps", _is_whole(self.warmup_steps, 0), "a whole number, at least 0"),
            ("warmup_steps", self.warmup_steps < self.steps, f"fewer than the {self.steps} steps"),
            ("final_share", 0 <= self.final_share <= 1, "a share from 0 to 1"),
            ("gradient_clip", 0 < self.gradient_clip < math.inf, "a number above 0"),
            (
                "seed",
                _is_whole(self.seed, 0) and self.seed < 2**63,
                "a whole number from 0, below 2**63",
            ),
            ("validate_every", _is_whole(self.validate_every, 1), "a whole number, at least 1"),
            ("checkpoint_every", _is_whole(self.checkpoint_every, 1), "a whole number, at least 1"),
            ("precision", self.precision in ("float32", "bfloat16"), "float32 or bfloat16"),
        )
        for name, holds, expected in conditions:
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give {expected}")

    def learning_rate_at(self, index: int) -> float:
        """The learning rate of a step.

        Args:
            index: Steps done before it.

        Returns:
            A linear rise over the warm-up, then half a cosine down to the final share.
        """
        if index < self.warmup_steps:
            return self.learning_rate * (index + 1) / self.warmup_steps
        progress = (index - self.warmup_steps) / (self.steps - self.warmup_steps)
        height = (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * (self.final_share + (1 - self.final_share) * height)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
