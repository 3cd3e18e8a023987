"""Rollouts: what the full cache and sampled pruned ones say of the same text.

The student is pruned by a policy whose scores carry Gumbel noise, so that the kept set is a sample
from the Plackett-Luce distribution (DistillCache, arXiv 2608.08878). The text is given, so that a
block of tokens is one forward; with blocks of one token the cache is pruned at every step, as in
the paper.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache import CACHE_KEYWORD, CacheSpec, KVCache, prefill
from kvfold.cache.layer import CacheLayer
from kvfold.cache.slots import Slots
from kvfold.evict.build import evicting_layers
from kvfold.evict.layer import EvictingLayer, Eviction
from kvfold.evict.network import PolicyNetwork
from kvfold.evict.policies.distill import WINDOW, FeaturePolicy
from kvfold.evict.token_scope import TokenScope
from kvfold.ops.divergence import kl_divergence
from kvfold.ops.sampling import conditional_poisson_sample, plackett_luce_sample

Law = Literal["plackett-luce", "conditional-poisson"]
"""The distribution over kept sets that is sampled, and whose log-probability is differentiated."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice of what to keep, made by K rollouts."""

    at: int
    """First token of the continuation that sees its outcome."""
    features: torch.Tensor
    """`[K, T, 5]`."""
    held: torch.Tensor
    """Tokens held, `[K]`."""
    candidates: torch.Tensor
    """The tokens that were not protected, `[K, T]`."""
    kept: torch.Tensor
    """Candidates kept, in the order drawn, `[K, N]`."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """K prunings of one text."""

    decisions: tuple[Decision, ...]
    """Those that the continuation sees the outcome of: mostly one a block, none where all fits."""
    divergences: torch.Tensor
    """`KL(full || pruned)` after each token of the continuation, `[K, N]`."""


@dataclass(frozen=True)
class _Watched(FeaturePolicy):
    """Notes features; the scope scores them."""

    summary = "features alone"

    def score_together(self, layers: Sequence[Slots]) -> torch.Tensor:
        raise NotImplementedError


class _SamplingScope(TokenScope):
    """Prunes by a network's scores and noise, once it has a network; remembers each choice."""

    def __init__(self) -> None:
        self.network: PolicyNetwork | None = None
        self.generator: torch.Generator | None = None
        self.law: Law = "plackett-luce"
        self.decisions: list[Decision] = []
        # Tokens of the continuation that are done, and those that the forward at hand adds.
        self._done = self._new = 0

    def before_forward(self, layers: list[CacheLayer], count: int) -> None:
        if self.network is not None:
            self._new = count
            super().before_forward(layers, count)

    def after_forward(self, layers: list[CacheLayer]) -> None:
        if self.network is not None:
            self._done, self._new = self._done + self._new, 0
            super().after_forward(layers)

    def _scores(self, evicting: Sequence[EvictingLayer]) -> torch.Tensor:
        assert self.network is not None
        first = evicting[0]
        features, held = features_of(evicting), first.slots.counts
        scores = self.network(features, held)
        candidates = ~first.shielded()[:, 0]
        room = min(first.budgeted, len(first.slots) - 1)
        count = max(room - int((~candidates[0]).sum()), 0)
        kept = self._draw(scores, count, candidates)
        self.decisions.append(Decision(self._done, features, held, candidates, kept))
        # Ranked as drawn, so that the cut keeps exactly these.
        order = torch.arange(count, 0, -1, device=scores.device, dtype=scores.dtype)
        ranks = torch.zeros_like(scores).scatter(-1, kept, order.expand_as(kept))
        return ranks[:, None]

    def _draw(self, scores: torch.Tensor, count: int, candidates: torch.Tensor) -> torch.Tensor:
        if self.generator is None:
            return scores.masked_fill(~candidates, -torch.inf).topk(count, dim=-1).indices
        draw = plackett_luce_sample if self.law == "plackett-luce" else conditional_poisson_sample
        return draw(scores, count, generator=self.generator, candidates=candidates)


def features_of(layers: Sequence[CacheLayer]) -> torch.Tensor:
    """The features of the tokens that all layers hold, `[B, T, 5]`."""
    return _Watched().features([layer.slots for layer in layers])


class Text:
    """A prompt that was run once, and what the full cache says of its continuation."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: torch.Tensor,
        continuation: int,
        *,
        sinks: int,
        recent: int,
    ) -> None:
        """Run the prompt and the continuation through the model, with everything kept.

        Args:
            model: An attached model.
            tokens: Prompt and continuation, `[T + N]`.
            continuation: N, the last tokens that are scored.
            sinks: First tokens that always stay.
            recent: Last tokens that always stay.
        """
        self.model = model
        tokens = tokens.to(model.device)
        self.prompt, self.continuation = tokens[:-continuation], tokens[-continuation:]
        self._scope = _SamplingScope()
        self._cache = self._full_cache(sinks, recent)
        prefill(model, self.prompt[None], self._cache)
        teacher = self._cache.fork()
        self.expected = _logits(model, teacher, self.continuation[None])[0]
        self.mass_to_come = self._mass_to_come(teacher)

    def _full_cache(self, sinks: int, recent: int) -> KVCache:
        count, order = evicting_layers(self.model), itertools.count()
        # A ratio of 1 is rounded down as any other: nothing may go before pruning begins.
        whole = Budget(2**31, "tokens")
        eviction = Eviction(_Watched(), whole, "token", sinks, recent, count)
        return KVCache(
            self.model,
            CacheSpec("distill"),
            lambda: EvictingLayer(eviction, next(order)),
            coordinator=self._scope,
        )

    def _mass_to_come(self, teacher: KVCache) -> torch.Tensor:
        """Attention mass that its last 64 queries give each prompt token, on average, `[T]`."""
        weight = min(len(self.continuation) / WINDOW, 1.0)
        before = features_of(self._cache.own_layers)[0, :, 0]
        after = features_of(teacher.own_layers)[0, : len(before), 0]
        return ((after - (1 - weight) * before) / weight).clamp_min(0)

    @property
    def features(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompt's features `[1, T, 5]` and its number of tokens `[1]`."""
        layers = self._cache.own_layers
        return features_of(layers), layers[0].slots.counts

    @torch.no_grad()
    def roll_out(
        self,
        network: PolicyNetwork,
        budget: Budget,
        *,
        rollouts: int = 1,
        block: int,
        generator: torch.Generator | None = None,
        law: Law = "plackett-luce",
    ) -> Rollout:
        """Prune the prompt, continue it, and compare with the full cache.

        Args:
            network: Scores the tokens.
            budget: What may stay, of the length so far.
            rollouts: K, which differ in their noise.
            block: Tokens of the continuation between two prunings.
            generator: Of the noise; without it the best tokens are kept.
            law: The distribution of what is kept.

        Returns:
            The choices and their divergences; no gradient.
        """
        cache, scope = copy.deepcopy((self._cache, self._scope))
        for layer in cache.own_layers:
            assert isinstance(layer, EvictingLayer)
            layer.eviction = replace(layer.eviction, budget=budget)
        cache.batch_repeat_interleave(rollouts)
        scope.network, scope.generator, scope.law = network, generator, law
        scope.after_forward(cache.own_layers)
        found = []
        for start in range(0, len(self.continuation), block):
            tokens = self.continuation[start : start + block].expand(rollouts, -1)
            logits = _logits(self.model, cache, tokens)
            found.append(kl_divergence(self.expected[start : start + block], logits))
        divergences = torch.cat(found, dim=1)
        heard = tuple(each for each in scope.decisions if each.at < divergences.shape[1])
        return Rollout(heard, divergences)


@torch.no_grad()
def _logits(model: PreTrainedModel, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
    """Logits after each of some new tokens `[B, N]`: `[B, N, V]`."""
    start = cache.get_seq_length()
    positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
    output = model(
        input_ids=tokens, position_ids=positions, use_cache=True, **{CACHE_KEYWORD: cache}
    )
    return output.logits
