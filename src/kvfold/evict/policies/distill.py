"""distill: a small network, trained to preserve the full cache's output distribution.

DistillCache (arXiv 2608.08878). One kept set for all layers and heads: five features of each token,
averaged over layers, are scored by an MLP that reinforcement learning has trained. Departures:
the features' exponential window in decode (see `kvfold.evict.features`), the protected set of
`sinks` and `recent` (0 for the paper's), and one scoring for several generated tokens (`every`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel

from kvfold.cache.slots import Slots
from kvfold.evict.artifact import SHIPPED, PolicyArtifact
from kvfold.evict.features import attention_statistics, feature_matrix, value_norms
from kvfold.evict.options import whole_number
from kvfold.evict.policy import (
    NewTokens,
    Observation,
    Policy,
    mean_over_layers,
    register_policy,
)
from kvfold.models import shape_facts

WINDOW = 64
"""Queries that the features of attention are averaged over."""

_STATISTICS = ("mass", "spread", "weighted")


@dataclass(frozen=True)
class FeaturePolicy(Policy):
    """Notes the five features of every token; a subclass scores them."""

    scopes = ("token",)
    common = ("norm", *_STATISTICS)

    @property
    def window(self) -> int:
        """Queries of a prompt that are looked at."""
        return WINDOW

    def start(self, tokens: NewTokens) -> dict[str, torch.Tensor]:
        """Note the norm of the values."""
        return {"norm": value_norms(tokens.values)}

    def observe(self, slots: Slots, seen: Observation) -> None:
        """Move the means over the window on by the new queries."""
        weight = (seen.queries / WINDOW).clamp(max=1).view(-1, 1, 1)
        statistics = attention_statistics(seen.probabilities, seen.queries)
        for name, new in zip(_STATISTICS, statistics, strict=True):
            slots.field(name).lerp_(new, weight)

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

    policy: str = str(SHIPPED)
    """A file, folder or Hub repository of a trained policy; the shipped one by default."""
    every: int = 8
    """Generated tokens for which one scoring serves."""

    summary = "a network trained to preserve the output distribution (DistillCache)"

    def __post_init__(self) -> None:
        """Check the options, and read the policy."""
        whole_number("distill", "every", self.every, least=1)
        _ = self.artifact

    @cached_property
    def artifact(self) -> PolicyArtifact:
        """The trained policy."""
        return PolicyArtifact.from_pretrained(self.policy)

    @property
    def interval(self) -> int:
        """Generated tokens for which one scoring serves."""
        return self.every

    def concern(self, model: PreTrainedModel) -> str | None:
        """The model it was trained on, when this one has other shapes."""
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
