"""spa: recompute the generated tokens whose proxies have turned (SPA-Cache, arXiv 2602.02544).

A token's drift is the cosine between thin proxies of its values (see `proxy`), now and before, and
a curve over depth says how many tokens a layer recomputes (see `budget`). The paper's Algorithm 1
and its authors' code differ; both are here as presets, and every rule can be set by itself:

    preset   kv_refresh   reference     residual   dense_layers
    code     all          last_step     change     1
    paper    selected     last_update   output     0

`kv_refresh="all"` recomputes keys and values of all generated tokens in every step, and only
queries, attention and MLP sparsely. Under `last_step` a drift too slow to be chosen is forgotten
from step to step; under `last_update` it adds up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvfold.diffusion.budget import CURVES, BudgetCurve, require_share
from kvfold.diffusion.caches.cache import CacheState, DiffusionCache, register_cache
from kvfold.diffusion.caches.drift import (
    DriftRules,
    DriftState,
    Recomputed,
    Reference,
    Residual,
)
from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.model import DiffusionModel

DEFAULT_RANK = 128
"""Of the proxies, where values are at least as wide; else their width."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "code": {
        "kv_refresh": "all",
        "reference": "last_step",
        "residual": "change",
        "dense_layers": 1,
    },
    "paper": {
        "kv_refresh": "selected",
        "reference": "last_update",
        "residual": "output",
        "dense_layers": 0,
    },
    "llada-8b": {"curve": "llada-8b", "rank": 128, "refresh": 50, "refresh_generated": 7},
    "llada-1.5": {"curve": "llada-1.5", "rank": 128, "refresh": 50, "refresh_generated": 7},
    "dream-7b": {"curve": "dream-7b", "rank": 32, "refresh": 25, "refresh_generated": 2},
}
"""Options by name: `code` is what the authors' program does, `paper` its Algorithm 1, and the last
three are the paper's settings for its models (refresh intervals as for GSM8K)."""


@register_cache("spa")
@dataclass(frozen=True)
class SpaCache(DiffusionCache):
    """Compares thin proxies of values, at a share of tokens that depends on depth."""

    summary = "recomputes the tokens whose value proxies have turned (SPA-Cache)"

    ratio: float | None = None
    """Mean share of the generated tokens that a layer recomputes; the curve's own without it."""
    curve: str | BudgetCurve = "uniform"
    """How the share goes over depth: a curve, or a name in `CURVES`."""
    rank: int | None = None
    """R of the proxies; 128 without it, or the width of values if that is less."""
    refresh: int = 50
    """Steps from one recomputation of everything to the next."""
    refresh_generated: int = 7
    """Steps from one recomputation of all that is generated to the next."""
    kv_refresh: Recomputed = "all"
    """Whose keys and values are recomputed: `all` generated tokens', or the `selected` ones'."""
    reference: Reference = "last_step"
    """Drift since the `last_step`, or since a token's `last_update`."""
    residual: Residual = "change"
    """What is kept of a layer: the `change` it makes to its input, or its `output`."""
    dense_layers: int = 0
    """First layers that recompute all generated tokens."""

    def __post_init__(self) -> None:
        """Check the options."""
        if self.ratio is not None:
            require_share(self.ratio, "spa: ratio")
        known = isinstance(self.curve, str | BudgetCurve)
        self.require("curve", "a BudgetCurve or the name of one", holds=known)
        self._curve.shares(2, mean=self.ratio)
        self.require_whole("rank", optional=True)
        self.require_whole("refresh")
        self.require_whole("refresh_generated")
        self.require_whole("dense_layers", least=0)
        self.require_choice("kv_refresh", ("all", "selected"))
        self.require_choice("reference", ("last_step", "last_update"))
        self.require_choice("residual", ("change", "output"))

    @property
    def _curve(self) -> BudgetCurve:
        return CURVES[self.curve] if isinstance(self.curve, str) else self.curve

    def shares(self, layers: int) -> list[float]:
        """The share of the generated tokens that each of so many layers recomputes."""
        shares = self._curve.shares(layers, mean=self.ratio)
        return [1.0] * min(self.dense_layers, layers) + shares[self.dense_layers :]

    def start(self, model: DiffusionModel, canvas: Canvas) -> CacheState:
        """Room for keys, values, proxies and what is kept of each layer.

        Raises:
            ConfigError: The rank is above the width of values.
        """
        width = min(model.shape.value_width, model.shape.hidden)
        proxies = model.proxies(min(DEFAULT_RANK, width) if self.rank is None else self.rank)

        def signal(index: int, normed: torch.Tensor) -> torch.Tensor:
            return proxies[index](normed)

        rules = DriftRules(
            ratios=self.shares(model.shape.layers),
            signal=signal,
            refresh=self.refresh,
            refresh_generated=self.refresh_generated,
            recomputed=self.kv_refresh,
            reference=self.reference,
            residual=self.residual,
            factor_bytes=sum(proxy.nbytes for proxy in proxies),
        )
        return DriftState(rules, model, canvas)
