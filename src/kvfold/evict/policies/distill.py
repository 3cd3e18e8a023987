"""distill: a small network, trained to preserve the full cache's output distribution.

DistillCache (arXiv 2608.08878). Five features of each token are scored by an MLP that reinforcement
learning has trained; the kv heads that matter most keep everything within the same total.
Departures: one kept set for each layer, its features averaged over the heads that are pruned (the
paper's is one for all layers, scope `token`); the features' exponential window in decode (see
`kvfold.evict.features`), fed by one query of four; the protected set of `sinks` and `recent` (0 for
the paper's); and one scoring for several generated tokens (`every`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache.slots import Slots
from kvfold.errors import ConfigError
from kvfold.evict.artifact import SHIPPED, PolicyArtifact, locate
from kvfold.evict.features import attention_statistics, feature_matrix, value_norms
from kvfold.evict.options import whole_number
from kvfold.evict.policy import (
    NewTokens,
    Observation,
    Policy,
    Scope,
    mean_over_layers,
    register_policy,
)
from kvfold.evict.whole_heads import WHOLE, HeadPlan, plan_heads
from kvfold.models import shape_facts

WINDOW = 64
"""Queries that the features of attention are averaged over."""

STRIDE = 4
"""Generated tokens of which one query is looked at, each layer at others."""

_STATISTICS = ("mass", "spread", "weighted")


@dataclass(frozen=True)
class FeaturePolicy(Policy):
    """Notes the five features of every token; a subclass scores them."""

    scopes = ("layer", "token")
    common = ("norm", *_STATISTICS)

    @property
    def window(self) -> int:
        """Queries of a prompt that are looked at."""
        return WINDOW

    @property
    def stride(self) -> int:
        """Generated tokens of which one query is looked at."""
        return STRIDE

    def start(self, tokens: NewTokens) -> dict[str, torch.Tensor]:
        """Note the norm of the values."""
        return {"norm": value_norms(tokens.values)}

    def observe(self, slots: Slots, seen: Observation) -> None:
        """Move the means over the window on by the new queries."""
        statistics = attention_statistics(seen.probabilities, seen.queries)
        means = slots.block(_STATISTICS[0], len(_STATISTICS))
        means[:, 0].lerp_(statistics, seen.share_of(WINDOW))

    def score(self, slots: Slots) -> torch.Tensor:
        """As if the layer were the only one, `[B, 1, T]`."""
        return self.score_together([slots])

    def features(self, layers: Sequence[Slots]) -> torch.Tensor:
        """The features of the tokens that all layers hold, `[B, T, 5]`."""
        mass, norm, spread, weighted = (
            mean_over_layers([slots.field(name) for slots in layers])
            for name in ("mass", "norm", "spread", "weighted")
        )
        return feature_matrix(mass, norm, spread, weighted, layers[0].positions)


@register_policy("distill")
@dataclass(frozen=True)
class Distill(FeaturePolicy):
    """The tokens that a trained network scores highest."""

    policy: str | Path = str(SHIPPED)
    """A file, folder or Hub repository of a trained policy; the shipped one by default."""
    digest: str | None = None
    """SHA-256 of the weights, to be warned of others; a saved cache has that of its policy."""
    every: int = 32
    """Generated tokens for which one scoring serves; a 16th of what is held, where that is more and
    not every token is scored for."""
    whole: float = WHOLE
    """Share of the kv heads that may keep everything, the most important first; 0 for none. They
    take at most 60 % of a budget, which has to be a share of the text's length."""

    summary = "a network trained to preserve the output distribution (DistillCache)"

    def __post_init__(self) -> None:
        """Check the options, and read the policy."""
        whole_number("distill", "every", self.every, least=1)
        if isinstance(self.whole, bool) or not isinstance(self.whole, float | int):
            raise ConfigError(f"distill: whole is {self.whole!r}, give a share of the kv heads")
        if not 0 <= self.whole <= 1:
            raise ConfigError(f"distill: whole is {self.whole:g}, give a share from 0 to 1")
        if not isinstance(self.policy, str | Path):
            raise ConfigError(
                f"distill: policy is {self.policy!r}, give the name of a file, folder or Hub "
                "repository"
            )
        if not isinstance(self.digest, str | None):
            raise ConfigError(f"distill: digest is {self.digest!r}, give the SHA-256 as a string")
        # As a saved cache has to know them: by a name that holds everywhere, with its weights.
        object.__setattr__(self, "policy", locate(self.policy))
        object.__setattr__(self, "digest", self.digest or self.artifact.digest())

    @cached_property
    def artifact(self) -> PolicyArtifact:
        """The trained policy."""
        return PolicyArtifact.from_pretrained(self.policy)

    @property
    def default_scope(self) -> Scope:
        """The one that its policy was trained for."""
        return "token" if self.artifact.scope == "token" else "layer"

    @property
    def interval(self) -> int:
        """Generated tokens for which one scoring serves."""
        return self.every

    def plan(self, model: PreTrainedModel, budget: Budget) -> HeadPlan:
        """The heads that were important on the model that the policy was trained on."""
        if self.artifact.facts != shape_facts(model):
            return HeadPlan({}, budget)
        return plan_heads(self.artifact.importance, budget, self.whole)

    def concern(self, model: PreTrainedModel) -> str | None:
        """That its weights are not the expected ones, or its model was one of other shapes."""
        if self.digest != self.artifact.digest():
            return (
                f"the weights at {self.policy} are others than those the cache was made with: what "
                "goes from now on is chosen by the new ones"
            )
        if self.artifact.facts == shape_facts(model):
            return None
        return (
            f"its policy was trained on {self.artifact.trained_on} and this model has other "
            "shapes: measure what it keeps, or train one with `kvfold train distill`"
        )

    def score_together(self, layers: Sequence[Slots]) -> torch.Tensor:
        """The network's score of each token, `[B, 1, T]`."""
        network = self.artifact.network.to(layers[0].positions.device)
        return network(self.features(layers), layers[0].counts)[:, None]
