"""dllm: recompute the generated tokens whose values have turned (dLLM-Cache, arXiv 2506.06295).

Everything is recomputed every `refresh` steps, what is generated every `refresh_generated`. In
between, the values of all generated tokens are computed and stored, and the `ratio` of them whose
values have turned furthest since the last step get a new key, attention and MLP output; of the
others, what the layer added to its input is used again. The paper refreshes the prompt alone at its
interval; here what is generated is refreshed with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.diffusion.budget import require_share
from kvfold.diffusion.caches.cache import CacheState, DiffusionCache, register_cache
from kvfold.diffusion.caches.drift import DriftRules, DriftState
from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.model import DiffusionModel


@register_cache("dllm")
@dataclass(frozen=True)
class ValueCache(DiffusionCache):
    """Compares whole values, at an equal share of tokens in all layers."""

    summary = "recomputes the tokens whose values have turned (dLLM-Cache)"

    ratio: float = 0.25
    """Share of the generated tokens that a layer recomputes, above 0 and at most 1."""
    refresh: int = 50
    """Steps from one recomputation of everything to the next."""
    refresh_generated: int = 7
    """Steps from one recomputation of all that is generated to the next."""

    def __post_init__(self) -> None:
        """Check the options."""
        require_share(self.ratio, "dllm: ratio")
        self.require_whole("refresh")
        self.require_whole("refresh_generated")

    def start(self, model: DiffusionModel, canvas: Canvas) -> CacheState:
        """Room for keys, values and what is added by each layer."""
        rules = DriftRules(
            ratios=[self.ratio] * model.shape.layers,
            signal=None,
            refresh=self.refresh,
            refresh_generated=self.refresh_generated,
        )
        return DriftState(rules, model, canvas)
