"""Means with their uncertainty: bootstrap intervals."""

from __future__ import annotations

from dataclasses import dataclass

import torch

RESAMPLES = 2000
"""Bootstrap samples."""


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
    def of(cls, values: torch.Tensor, *, seed: int) -> Interval:
        """From a sample `[N]`, N at least 1."""
        values = values.double().cpu()
        generator = torch.Generator().manual_seed(seed)
        picks = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
        bounds = values[picks].mean(dim=1).quantile(torch.tensor([0.025, 0.975]).double())
        return cls(float(values.mean()), float(bounds[0]), float(bounds[1]), len(values))
