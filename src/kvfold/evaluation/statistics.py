"""Means and shares with their uncertainty: bootstrap and Wilson intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 2000
"""Bootstrap samples."""
NORMAL = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its bootstrap 95 % interval over tokens."""

    mean: float
    """Of the sample."""
    low: float
    """2.5 % quantile of the mean."""
    high: float
    """97.5 % quantile of the mean."""
    count: int
    """Size of the sample."""

    @classmethod
    def of(cls, sample: torch.Tensor | Sequence[float], *, seed: int) -> Interval:
        """From a sample `[N]`, N at least 1; all is computed in float64."""
        values = torch.as_tensor(sample, dtype=torch.float64, device="cpu")
        generator = torch.Generator().manual_seed(seed)
        picks = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
        bounds = values[picks].mean(dim=1).quantile(torch.tensor([0.025, 0.975]).double())
        return cls(float(values.mean()), float(bounds[0]), float(bounds[1]), len(values))

    def exp(self) -> Interval:
        """The same of the exponential: its geometric mean, whose bounds go with the mean's."""
        return Interval(math.exp(self.mean), math.exp(self.low), math.exp(self.high), self.count)


@dataclass(frozen=True, slots=True)
class Share:
    """How many of some are so, with the Wilson 95 % interval of the share (Wilson, 1927)."""

    right: int
    """Those that are."""
    count: int
    """All of them, one at least."""

    @property
    def mean(self) -> float:
        """The share itself."""
        return self.right / self.count

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval, from 0 to 1."""
        square = NORMAL**2 / self.count
        middle = (self.mean + square / 2) / (1 + square)
        spread = self.mean * (1 - self.mean) / self.count + square / (4 * self.count)
        half = NORMAL * math.sqrt(spread) / (1 + square)
        return max(middle - half, 0.0), min(middle + half, 1.0)

    def to_dict(self) -> dict[str, object]:
        """The share as plain data."""
        low, high = self.bounds
        return {
            "right": self.right,
            "count": self.count,
            "mean": self.mean,
            "low": low,
            "high": high,
        }
