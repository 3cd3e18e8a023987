"""none: everything anew in every step; what all caches are measured against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.diffusion.caches.cache import CacheState, DiffusionCache, register_cache
from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.flow import Flow, Outputs, run_flow
from kvfold.diffusion.model import DiffusionModel


@register_cache("none")
@dataclass(frozen=True)
class NoCache(DiffusionCache):
    """Keeps nothing."""

    summary = "no cache: every token in every step"

    def start(self, model: DiffusionModel, canvas: Canvas) -> CacheState:
        """Nothing to hold."""
        return NoState(model)


class NoState(CacheState):
    """Holds nothing."""

    @property
    def nbytes(self) -> int:
        """None."""
        return 0

    def step(self, canvas: Canvas) -> Outputs:
        """Run all tokens."""
        return Outputs(run_flow(self.model, canvas, Flow(), None, self.work))

    def keep(self, rows: torch.Tensor) -> None:
        """Nothing to do."""
