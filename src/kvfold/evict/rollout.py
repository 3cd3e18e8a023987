"""Rollouts: what the full cache and sampled pruned ones say of the same text.

The student is pruned by a policy whose scores carry Gumbel noise, so that the kept set is a sample
from the Plackett-Luce distribution (DistillCache, arXiv 2608.08878). The text is given, so that a
block of tokens is one forward; with blocks of one token the cache is pruned at every step, as in
the paper.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache import CACHE_KEYWORD, CacheLayer, CacheSpec, KVCache, Outcome, Slots, prefill
from kvfold.cache.replay import RecordingCache, replay
from kvfold.evict.build import evicting_layers, layer_maker
from kvfold.evict.importance import head_importance
from kvfold.evict.layer import EvictingLayer, Eviction
from kvfold.evict.network import PolicyNetwork
from kvfold.evict.policies.distill import WINDOW, FeaturePolicy
from kvfold.evict.policy import Scope
from kvfold.evict.token_scope import evicting_of
from kvfold.evict.whole_heads import HeadPlan
from kvfold.ops.divergence import kl_divergence
from kvfold.ops.sampling import conditional_poisson_sample, plackett_luce_sample

Law = Literal["plackett-luce", "conditional-poisson"]
"""The distribution over kept sets that is sampled, and whose log-probability is differentiated."""

_UNLIMITED = Budget(2**31, "tokens")
"""A ratio of 1 is rounded down as any other: nothing may go before pruning begins."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a policy decides on."""

    scope: Scope
    """`token`: one kept set for all layers; `layer`: one for each."""
    sinks: int
    """First tokens that always stay."""
    recent: int
    """Last tokens that always stay."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice of S kept sets, made by K rollouts."""

    at: int
    """First token of the continuation that sees its outcome."""
    features: torch.Tensor
    """`[S, K, T, 5]`."""
    held: torch.Tensor
    """Tokens held, `[S, K]`."""
    candidates: torch.Tensor
    """The tokens that were not protected, `[S, K, T]`."""
    kept: torch.Tensor
    """Candidates kept, in the order drawn, `[S, K, N]`."""


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


class _Sampler:
    """Prunes by a network's scores and noise, once it has a network; remembers each choice."""

    def __init__(self, scope: Scope) -> None:
        self.network: PolicyNetwork | None = None
        self.generator: torch.Generator | None = None
        self.law: Law = "plackett-luce"
        self.decisions: list[Decision] = []
        self._scope = scope
        # Tokens of the continuation that are done, and those that the forward at hand adds.
        self._done = self._new = 0

    def before_forward(self, layers: list[CacheLayer], count: int) -> None:
        if self.network is None:
            return
        self._new, evicting = count, evicting_of(layers)
        if count > 1:
            return
        is_full = [layer.make_room() for layer in evicting]
        if all(is_full):
            for layer, ranks in zip(evicting, self._ranks(evicting), strict=True):
                layer.use(layer.choose(ranks))

    def after_forward(self, layers: list[CacheLayer], outcome: Outcome | None = None) -> None:
        if self.network is None:
            return
        self._done, self._new = self._done + self._new, 0
        evicting = evicting_of(layers)
        if evicting and evicting[0].is_over:
            for layer, ranks in zip(evicting, self._ranks(evicting), strict=True):
                layer.cut(ranks)

    def _ranks(self, evicting: Sequence[EvictingLayer]) -> list[torch.Tensor]:
        """A ranking for every layer, `[K, 1, T]`, by which exactly the drawn tokens are kept."""
        assert self.network is not None
        features, held = self.features(evicting)
        shielded = [layer.shielded()[:, 0] for layer in evicting[: len(features)]]
        candidates = ~torch.stack(shielded)
        scores = self.network(features.flatten(0, 1), held.flatten()).view(candidates.shape)
        room = min(evicting[0].budgeted, len(evicting[0].slots) - 1)
        count = max(room - int((~candidates[0, 0]).sum()), 0)
        kept = self._draw(scores, count, candidates)
        self.decisions.append(Decision(self._done, features, held, candidates, kept))
        order = torch.arange(count, 0, -1, device=scores.device, dtype=scores.dtype)
        ranks = torch.zeros_like(scores).scatter(-1, kept, order.expand_as(kept))
        return [each[:, None] for each in ranks.expand(len(evicting), -1, -1)]

    def features(self, layers: Sequence[CacheLayer]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of the S kept sets, `[S, B, T, 5]`, and the tokens held, `[S, B]`."""
        slots = [layer.slots for layer in layers]
        sets = [slots] if self._scope == "token" else [[each] for each in slots]
        device = slots[0].positions.device
        features = [_Watched().features(each).to(device) for each in sets]
        return torch.stack(features), torch.stack([each[0].counts.to(device) for each in sets])

    def _draw(self, scores: torch.Tensor, count: int, candidates: torch.Tensor) -> torch.Tensor:
        if self.generator is None:
            return scores.masked_fill(~candidates, -torch.inf).topk(count, dim=-1).indices
        draw = plackett_luce_sample if self.law == "plackett-luce" else conditional_poisson_sample
        return draw(scores, count, generator=self.generator, candidates=candidates)


class Text:
    """A prompt that was run once, and what the full cache says of its continuation."""

    def __init__(self, model: PreTrainedModel, tokens: torch.Tensor, continuation: int) -> None:
        """Run the prompt and the continuation through the model, with everything kept.

        Args:
            model: An attached model.
            tokens: Prompt and continuation, `[T + N]`.
            continuation: N, the last tokens that are scored.
        """
        self.model = model
        tokens = tokens.to(model.device)
        self.prompt, self.continuation = tokens[:-continuation], tokens[-continuation:]
        self._full = RecordingCache(model)
        prefill(model, self.prompt[None], self._full)
        self.expected = _logits(model, self._full.fork(), self.continuation[None])[0]

    @torch.no_grad()
    def student(self, keeping: Keeping, plan: HeadPlan) -> Student:
        """A cache that has heard the prompt and is to be pruned.

        Args:
            keeping: What is decided on.
            plan: The heads that keep everything, and what the others may keep.
        """
        return Student(self, self._full, keeping, plan)

    def head_importance(self, keeping: Keeping, budget: Budget, *, clip: float) -> torch.Tensor:
        """What each kv head is worth; see `kvfold.evict.importance`.

        Args:
            keeping: Which tokens are protected; of the others those with the most mass stay.
            budget: What may stay.
            clip: A token's divergence counts for at most so many nats.
        """
        layered = replace(keeping, scope="layer")
        kept = self.student(layered, HeadPlan({}, budget)).most_attended()
        return head_importance(
            self.model, self._full, self.continuation, self.expected, kept, clip=clip
        )


class Student:
    """A cache that holds a prompt whole, and prunings of it."""

    def __init__(self, text: Text, full: RecordingCache, keeping: Keeping, plan: HeadPlan) -> None:
        """Let a new cache hear the prompt; `Text.student` does."""
        self._text, self._plan = text, plan
        self._sampler = _Sampler(keeping.scope)
        # The sampler acts after each forward on all layers, whatever shares a kept set.
        eviction = Eviction(
            _Watched(),
            _UNLIMITED,
            "token",
            keeping.sinks,
            keeping.recent,
            evicting_layers(text.model),
        )
        make_layer = layer_maker(text.model, eviction, plan)
        spec = CacheSpec("distill")
        self._cache = KVCache(text.model, spec, make_layer, coordinator=self._sampler)
        replay(full, self._cache)

    @property
    def features(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The prompt's features `[S, T, 5]` and its number of tokens `[S]`."""
        features, held = self._sampler.features(evicting_of(self._cache.parts))
        return features[:, 0], held[:, 0]

    @torch.no_grad()
    def mass_to_come(self) -> torch.Tensor:
        """Attention mass that the continuation's last 64 queries give each token, `[S, T]`."""
        heard = self._cache.fork()
        _logits(self._text.model, heard, self._text.continuation[None])
        weight = min(len(self._text.continuation) / WINDOW, 1.0)
        before = self.features[0][..., 0]
        after = self._sampler.features(evicting_of(heard.parts))[0][:, 0, : before.shape[1], 0]
        return ((after - (1 - weight) * before) / weight).clamp_min(0)

    def most_attended(self) -> torch.Tensor:
        """Which prompt tokens each layer keeps by their mass, within the budget, `[L, T]`."""
        kept = []
        for layer in self._limited()[0].parts:
            assert isinstance(layer, EvictingLayer)
            everything = torch.zeros(
                len(layer.slots), dtype=torch.bool, device=self._text.prompt.device
            )
            layer.cut(layer.slots.field("mass"))
            kept.append(everything.index_fill(0, layer.slots.positions[0, 0].long(), value=True))
        return torch.stack(kept)

    def _limited(self) -> tuple[KVCache, _Sampler]:
        """A copy under the plan's budget, which nothing has been cut to yet, and its sampler."""
        cache, sampler = copy.deepcopy((self._cache, self._sampler))
        for layer in evicting_of(cache.parts):
            layer.eviction = replace(layer.eviction, budget=self._plan.rest)
        return cache, sampler

    @torch.no_grad()
    def roll_out(
        self,
        network: PolicyNetwork,
        *,
        rollouts: int = 1,
        block: int,
        generator: torch.Generator | None = None,
        law: Law = "plackett-luce",
    ) -> Rollout:
        """Prune the prompt, continue it, and compare with the full cache.

        Args:
            network: Scores the tokens.
            rollouts: K, which differ in their noise.
            block: Tokens of the continuation between two prunings.
            generator: Of the noise; without it the best tokens are kept.
            law: The distribution of what is kept.

        Returns:
            The choices and their divergences; no gradient.
        """
        text = self._text
        cache, sampler = self._limited()
        cache.batch_repeat_interleave(rollouts)
        sampler.network, sampler.generator, sampler.law = network, generator, law
        sampler.after_forward(cache.parts)
        found = []
        for start in range(0, len(text.continuation), block):
            tokens = text.continuation[start : start + block].expand(rollouts, -1)
            logits = _logits(text.model, cache, tokens)
            found.append(kl_divergence(text.expected[start : start + block], logits))
        divergences = torch.cat(found, dim=1)
        heard = tuple(each for each in sampler.decisions if each.at < divergences.shape[1])
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
