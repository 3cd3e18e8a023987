"""Learning a policy by reinforcement, so that pruning changes what the model says least.

DistillCache (arXiv 2608.08878): the reward of a step is `-KL(full || pruned)`, the kept set is
drawn by Gumbel top-B, and its log-probability is weighted by the return's advantage over the other
rollouts of the same prompt. Departures: each layer has a kept set of its own and some heads keep
everything, unless `scope` and `whole` say otherwise; reinforcement starts from a supervised ranker,
fitted to the attention that each token will receive, and not from a random policy; a step is rolled
out under several budgets, pruned a block of tokens at a time, on the text's own continuation;
rewards are clipped; returns are means, not sums; log-probabilities are means over draws, and the
entropy is the first draw's; advantages are divided by a running scale, and the running mean of the
returns is the baseline of a single rollout only. A budget keeps at least 8 tokens, where the paper
says 32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.errors import ConfigError, UnsupportedModelError
from kvfold.evict.build import evicting_layers, kv_heads
from kvfold.evict.features import FEATURES
from kvfold.evict.network import PolicyNetwork
from kvfold.evict.policies.distill import FeaturePolicy
from kvfold.evict.policy import Scope
from kvfold.evict.rollout import Decision, Keeping, Law, Rollout, Student, Text
from kvfold.evict.whole_heads import WHOLE, plan_heads
from kvfold.models import fingerprint
from kvfold.ops.sampling import (
    choice_entropy,
    conditional_poisson_log_prob,
    plackett_luce_log_prob,
)
from kvfold.training import StepOutcome
from kvfold.training.corpus import Corpus
from kvfold.training.words import Split

_TINY = 1e-12
_APART = 1_000_000
"""Number of the first excerpt that comes before the steps, which count from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """How a policy is trained, beside the loop's `TrainingSettings`."""

    budgets: tuple[float, ...] = (0.125, 0.25)
    """Shares of the length that may stay; each step rolls out under every one."""
    horizon: int = 32
    """Tokens of the continuation that are scored, at most."""
    block: int = 8
    """Tokens between two prunings; 1 is the paper's, and slow."""
    rollouts: int = 8
    """K, prunings of one prompt that are compared."""
    discount: float = 0.99
    """Of the reward, a token."""
    entropy_bonus: float = 0.01
    """Weight of the entropy of the first draw, as a share of the largest possible."""
    clip: float = 2.0
    """A token's divergence counts for at most so many nats: it is heavy-tailed."""
    ranker_texts: int = 48
    """Excerpts to which a supervised ranker is fitted before the first step; 0 for none."""
    law: Law = "plackett-luce"
    """Of the kept sets."""
    scope: Scope = "layer"
    """What shares one kept set: all layers and heads (`token`, the paper's) or the heads of one."""
    whole: float = WHOLE
    """Share of the kv heads that may keep everything, the most important first; 0 for none."""
    importance_texts: int = 16
    """Excerpts by which the importance of heads is measured; 0 for none."""
    features: tuple[str, ...] = FEATURES
    """What the policy may look at."""
    sinks: int = 4
    """First tokens that always stay."""
    recent: int = 32
    """Last tokens that always stay."""
    validation: int = 16
    """Excerpts of every validation; their full caches stay in memory."""

    def check(self) -> None:
        """Refuse what cannot be trained with.

        Raises:
            ConfigError: When a value is out of its range.
        """
        for budget in self.budgets:
            if Budget(budget, "ratio").is_everything:
                raise ConfigError("a budget of 1 keeps everything: give smaller shares")
        conditions = (
            ("budgets", len(self.budgets) > 0, "at least one share"),
            ("horizon", self.horizon >= 1, "at least 1"),
            ("block", 1 <= self.block <= self.horizon, f"1 to the horizon, {self.horizon}"),
            ("rollouts", self.rollouts >= 1, "at least 1"),
            ("discount", 0 <= self.discount <= 1, "a number from 0 to 1"),
            ("entropy_bonus", 0 <= self.entropy_bonus < float("inf"), "0 or more"),
            ("clip", self.clip > 0, "a number above 0"),
            ("scope", self.scope in FeaturePolicy.scopes, "layer or token"),
            ("whole", 0 <= self.whole <= 1, "a share from 0 to 1"),
            ("importance_texts", self.importance_texts >= 0, "0 or more"),
            ("ranker_texts", self.ranker_texts >= 0, "0 or more"),
            ("sinks", self.sinks >= 0, "0 or more"),
            ("recent", self.recent >= 0, "0 or more"),
            ("validation", self.validation >= 1, "at least 1"),
        )
        for name, holds, expected in conditions:
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give {expected}")


class PolicyLearner:
    """Trains a policy network; the model stays as it is."""

    criterion = "kl"

    def __init__(
        self,
        model: PreTrainedModel,
        corpus: Corpus,
        settings: DistillSettings,
        *,
        seed: int = 0,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        """Start with random weights, normalised to the features of some training texts.

        Args:
            model: An attached model; its weights are not touched.
            corpus: Excerpts of prompt and continuation.
            settings: How.
            seed: Of the weights.
            process: Which of several processes that train together this is, from 0. Each learns
                from texts of its own and keeps its own running statistics, so that a resumed run
                is the uninterrupted one exactly with one process only.
            processes: How many there are.

        Raises:
            ConfigError: When a value is out of its range.
            UnsupportedModelError: When no layer of the model has full attention.
        """
        settings.check()
        layers = evicting_layers(model)
        if layers == 0:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no full-attention layer: there is nothing to prune"
            )
        self.model, self.corpus, self.settings = model, corpus, settings
        self._process, self._processes = process, processes
        self._generator = torch.Generator().manual_seed(seed)
        self._network = PolicyNetwork(features=settings.features, generator=self._generator)
        self._network.to(model.device)
        self._importance = torch.zeros(layers, kv_heads(model))
        self._network.normalise(self._sample())
        # Running mean of the returns and of the squared advantages, and how many made them.
        self._running = torch.zeros(3)
        self._validation: list[tuple[Student, ...]] = []
        self.tokens_per_second = 0.0
        """Continuation tokens of all rollouts, in the last step; not kept, so that a curve is the
        same whenever it is run."""

    @property
    def module(self) -> PolicyNetwork:
        """The policy network."""
        return self._network

    def _sample(self, texts: int = 4) -> torch.Tensor:
        """Compressed features of some texts, `[N, 5]`."""
        found = [
            self._network.compress(*student.features).flatten(0, 1)
            for index in range(texts)
            for student in self._students(self._text("train", _APART + index))
        ]
        return torch.cat(found)

    @property
    def importance(self) -> torch.Tensor:
        """What each kv head that keeps everything is worth, `[L, G]` in nats a token."""
        return self._importance

    @property
    def _keeping(self) -> Keeping:
        settings = self.settings
        return Keeping(settings.scope, settings.sinks, settings.recent)

    def _text(self, split: Split, index: int) -> Text:
        excerpt, horizon = self.corpus.excerpt(index, split), self.settings.horizon
        scored = excerpt.scored or horizon
        # Of a long answer the beginning counts: it is what the prompt has to be read for.
        end = len(excerpt.tokens) - max(scored - horizon, 0)
        return Text(self.model, excerpt.tokens[:end], min(scored, horizon))

    def _students(self, text: Text) -> tuple[Student, ...]:
        """A cache to be pruned for every budget."""
        plans = [
            plan_heads(self._importance, Budget(share, "ratio"), self.settings.whole)
            for share in self.settings.budgets
        ]
        return tuple(text.student(self._keeping, plan) for plan in plans)

    def prepare(self, on_progress: Callable[[str, float], None] | None = None) -> None:
        """Find the important heads, and fit the scores to the attention that tokens will receive.

        Args:
            on_progress: Told what is done, and the share of it, 0 to 1.
        """
        tell = on_progress or (lambda what, share: None)
        if self.settings.whole > 0:
            self._weigh_heads(tell)
        inputs, wanted = [], []
        count = self.settings.ranker_texts
        for index in range(count):
            for student in self._students(self._text("train", _APART + index)):
                features, held = student.features
                inputs.append(self._network.compress(features, held).flatten(0, 1))
                mass = student.mass_to_come() * held[:, None]
                wanted.append((mass + 1e-3).log().flatten())
            tell("ranking: reading", (index + 1) / count)
        if count:
            self._network.normalise(torch.cat(inputs))
            fit_ranker(self._network, torch.cat(inputs), torch.cat(wanted), self._generator)

    def _weigh_heads(self, tell: Callable[[str, float], None]) -> None:
        """Measure the importance of each head under the smallest budget."""
        smallest = Budget(min(self.settings.budgets), "ratio")
        count = self.settings.importance_texts
        for index in range(count):
            text = self._text("train", 2 * _APART + index)
            found = text.head_importance(self._keeping, smallest, clip=self.settings.clip)
            self._importance += found / count
            tell("weighing heads", (index + 1) / count)

    def step(self, index: int, generator: torch.Generator) -> StepOutcome:
        """Roll out one excerpt under every budget."""
        started = time.monotonic()
        text = self._text("train", index * self._processes + self._process)
        losses, metrics, tokens = [], [], 0
        for student in self._students(text):
            rollout = student.roll_out(
                self._network,
                rollouts=self.settings.rollouts,
                block=self.settings.block,
                generator=generator,
                law=self.settings.law,
            )
            loss, found = self._reinforce(rollout)
            losses.append(loss)
            metrics.append(found)
            tokens += rollout.divergences.numel()
        mean = {name: sum(each[name] for each in metrics) / len(metrics) for name in metrics[0]}
        self.tokens_per_second = tokens / (time.monotonic() - started)
        return StepOutcome(torch.stack(losses).mean(), mean)

    # Reinforcement ----------------------------------------------------------------------------

    def _reinforce(self, rollout: Rollout) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of REINFORCE, whose gradient is the policy gradient, and what was seen."""
        reward = -rollout.divergences.clamp(max=self.settings.clip)
        divergences, decisions = rollout.divergences, rollout.decisions
        if not decisions:
            raise ConfigError(
                "a prompt fits into the budget, so that there is nothing to learn: give longer "
                "excerpts or smaller budgets"
            )
        starts = [decision.at for decision in decisions]
        advantages = self._advantages(discounted(reward, self.settings.discount, starts))
        laws = [self._log_prob(decision) for decision in decisions]
        log_probs = torch.stack([law for law, _ in laws], dim=1)
        entropy = torch.stack([entropy for _, entropy in laws], dim=1).mean()
        loss = -(advantages * log_probs).mean() - self.settings.entropy_bonus * entropy
        return loss, {
            "kl": -float(reward.mean()),
            "clipped": float((divergences > self.settings.clip).float().mean()),
            "entropy": float(entropy.detach()),
        }

    def _log_prob(self, decision: Decision) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean log-probability of a draw, and the entropy of the first: `[K]` each."""
        scores = self._network(decision.features.flatten(0, 1), decision.held.flatten())
        scores = scores.view(decision.candidates.shape)
        law = (
            plackett_luce_log_prob
            if self.settings.law == "plackett-luce"
            else conditional_poisson_log_prob
        )
        total = law(scores, decision.kept, decision.candidates)
        draws = max(decision.kept.shape[-1], 1)
        entropy = choice_entropy(scores, decision.candidates)
        return total.mean(0) / draws, entropy.mean(0)

    def _advantages(self, returns: torch.Tensor) -> torch.Tensor:
        """Returns `[K, N]` over those of the other rollouts, in units of their running scale."""
        count = returns.shape[0]
        if count > 1:
            others = (returns.sum(0, keepdim=True) - returns) / (count - 1)
        else:
            others = self._running[0].to(returns) / (1 - 0.99 ** self._running[2]).clamp_min(_TINY)
        advantages = returns - others
        new = torch.stack([returns.mean(), advantages.square().mean()]).cpu()
        self._running[:2].lerp_(new, 0.01)
        self._running[2] += 1
        scale = (self._running[1] / (1 - 0.99 ** self._running[2])).sqrt().clamp_min(1e-6)
        return advantages / scale.to(advantages)

    # Validation and resumption ----------------------------------------------------------------

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Mean clipped divergence on held-out excerpts, the best tokens kept, over all budgets."""
        if not self._validation:
            count = self.settings.validation
            texts = [self._text("validation", index) for index in range(count)]
            self._validation = [self._students(text) for text in texts]
        found = [[self._best(student) for student in students] for students in self._validation]
        means = {
            f"kl_{share:g}": sum(values) / len(values)
            for share, values in zip(self.settings.budgets, zip(*found, strict=True), strict=True)
        }
        return {"kl": sum(means.values()) / len(means)} | means

    def _best(self, student: Student) -> float:
        rollout = student.roll_out(self._network, block=self.settings.block)
        return float(rollout.divergences.clamp(max=self.settings.clip).mean())

    def state(self) -> Mapping[str, torch.Tensor]:
        """The running statistics of the returns, and the importance of the heads."""
        return {"running": self._running, "importance": self._importance}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take them back."""
        self._running = state["running"].clone()
        self._importance = state["importance"].clone()

    def identity(self) -> dict[str, object]:
        """The model, the texts and the settings."""
        return {
            "model": fingerprint(self.model),
            "dtype": str(self.model.dtype),
            "device": self.model.device.type,
            "corpus": self.corpus.describe(),
            "settings": asdict(self.settings),
        }


def fit_ranker(
    network: PolicyNetwork,
    inputs: torch.Tensor,
    wanted: torch.Tensor,
    generator: torch.Generator,
    *,
    updates: int = 1500,
    batch: int = 1024,
) -> None:
    """Fit a network's scores by least squares.

    Args:
        network: Changed in place.
        inputs: Compressed features, `[N, 5]`.
        wanted: Scores, `[N]`.
        generator: Draws the batches.
        updates: Of AdamW, whose rate falls from 3e-3 to 0.
        batch: Tokens an update.
    """
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, updates)
    for _ in range(updates):
        chosen = torch.randint(len(inputs), (batch,), generator=generator).to(inputs.device)
        loss = (network.score(inputs[chosen]) - wanted[chosen]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


def discounted(reward: torch.Tensor, discount: float, starts: Sequence[int]) -> torch.Tensor:
    """The mean discounted reward from some tokens on.

    Args:
        reward: A token, `[K, N]`.
        discount: A token's.
        starts: The first token of each return.

    Returns:
        `[K, len(starts)]`.
    """
    ahead = torch.arange(reward.shape[1]) - torch.tensor(starts)[:, None]
    weights = torch.where(ahead >= 0, discount ** ahead.clamp_min(0).double(), 0.0)
    weights = weights / weights.sum(1, keepdim=True)
    return reward @ weights.T.to(reward)
