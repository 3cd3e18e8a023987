"""Learning a policy: the estimator, a planted token, rollouts of a tiny model, and resumption."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.budget import Budget
from kvfold.errors import ConfigError, UnsupportedModelError
from kvfold.evict.artifact import PolicyArtifact
from kvfold.evict.learner import DistillSettings, PolicyLearner, discounted
from kvfold.evict.network import PolicyNetwork
from kvfold.evict.policy import Scope
from kvfold.evict.rollout import Decision, Keeping, Law, Rollout, Student, Text
from kvfold.evict.train import train_policy
from kvfold.evict.whole_heads import HeadPlan, plan_heads
from kvfold.models import shape_facts
from kvfold.ops.sampling import conditional_poisson_sample, plackett_luce_sample
from kvfold.training import TrainingSettings
from kvfold.training.corpus import Excerpt
from tests.contract import assert_close, attached
from tests.tiny import tiny_ids, tiny_model

SMALL = DistillSettings(
    budgets=(0.3,),
    ranker_texts=2,
    importance_texts=2,
    horizon=12,
    block=4,
    rollouts=3,
    sinks=2,
    recent=4,
    validation=2,
)


class TinyCorpus:
    """Random tokens for the tiny models."""

    def excerpt(self, index: int, split: str) -> Excerpt:
        seed = 2 * index + (split == "validation")
        return Excerpt(tokens=tiny_ids(1, 72, seed=seed)[0], kind="random", scored=None)

    def describe(self) -> dict[str, object]:
        return {"kind": "random tokens"}


class Planted:
    """A text whose continuation is right if and only if one token was kept.

    Its norm tells it from the others, which the policy has to find out.
    """

    def __init__(self, seed: int, tokens: int = 24) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.rand(tokens, 5, generator=generator)
        self.planted = int(torch.randint(tokens, (), generator=generator))
        self.features[self.planted, 1] = 3.0
        self.held = torch.tensor([tokens])

    def roll_out(
        self, network: PolicyNetwork, rollouts: int, generator: torch.Generator, law: Law
    ) -> Rollout:
        features = self.features.expand(1, rollouts, -1, -1)
        held = self.held.expand(1, rollouts)
        candidates = torch.ones(features.shape[:3], dtype=torch.bool)
        draw = plackett_luce_sample if law == "plackett-luce" else conditional_poisson_sample
        with torch.no_grad():
            scores = network(features[0], held[0])[None]
            kept = draw(scores, 6, generator=generator)
        lost = 1 - (kept[0] == self.planted).any(-1).float()
        decision = Decision(0, features, held, candidates, kept)
        return Rollout((decision,), lost[:, None])


@pytest.mark.parametrize("law", ["plackett-luce", "conditional-poisson"])
def test_a_planted_token_is_learnt(law: Law):
    learner = PolicyLearner(attached(), TinyCorpus(), DistillSettings(law=law, horizon=8))
    network = learner.module
    network.normalise(torch.cat([network.compress(t.features[None], t.held)[0] for t in texts(9)]))
    optimiser = torch.optim.AdamW(network.parameters(), lr=3e-3)
    before = share_kept(network)
    generator = torch.Generator().manual_seed(0)
    for seed in range(250):
        rollout = Planted(seed).roll_out(network, 4, generator, law)
        loss, _ = learner._reinforce(rollout)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert before < 0.7
    assert share_kept(network) == 1.0


def texts(count: int) -> list[Planted]:
    return [Planted(10_000 + seed) for seed in range(count)]


def share_kept(network: PolicyNetwork) -> float:
    """How often the best six tokens of texts never seen hold the planted one."""
    with torch.no_grad():
        best = [network(t.features[None], t.held)[0].topk(6).indices for t in texts(50)]
    return sum(t.planted in b for t, b in zip(texts(50), best, strict=True)) / 50


def test_returns_are_discounted_from_each_block_on():
    reward = torch.tensor([[-1.0, 0.0, -2.0, -4.0, -8.0]])
    found = discounted(reward, 0.5, [0, 2, 4])
    first = -(1 + 2 / 4 + 4 / 8 + 8 / 16) / (1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16)
    second = -(2 + 4 / 2 + 8 / 4) / (1 + 1 / 2 + 1 / 4)
    assert torch.allclose(found, torch.tensor([[first, second, -8.0]]))


def test_one_rollout_is_measured_against_the_running_mean():
    settings = DistillSettings(rollouts=1, horizon=8)
    learner = PolicyLearner(attached(), TinyCorpus(), settings)
    for _ in range(400):
        learner._advantages(torch.tensor([[-2.0]]))
    assert learner._advantages(torch.tensor([[-2.0]])).abs() < 0.01
    assert learner._advantages(torch.tensor([[-1.0]])) > 0.5


def student(tokens: int, continuation: int, budget: Budget, scope: Scope = "layer") -> Student:
    """A random text's cache in which no head keeps everything."""
    text = Text(attached(), tiny_ids(1, tokens)[0], continuation)
    return text.student(Keeping(scope, sinks=2, recent=4), HeadPlan({}, budget))


@pytest.mark.parametrize("scope", ["layer", "token"])
@pytest.mark.parametrize("block", [1, 4, 5, 11, 12])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_rollouts_record_each_choice_that_the_continuation_sees(
    block: int, share: float, scope: Scope
):
    network = PolicyNetwork(generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    budget = Budget(share, "ratio")
    pruned = student(172, 12, budget, scope)
    rollout = pruned.roll_out(network, rollouts=3, block=block, generator=generator)
    sets = 1 if scope == "token" else len(pruned.features[0])
    assert rollout.divergences.shape == (3, 12)
    assert torch.isfinite(rollout.divergences).all()
    kept = budget.tokens(160)
    for decision in rollout.decisions:
        always = int((~decision.candidates[0, 0]).sum())
        assert all(decision.candidates.gather(2, decision.kept).flatten())
        assert decision.kept.shape[2] + always <= budget.tokens(160 + decision.at)
    first = rollout.decisions[0]
    assert (first.at, first.features.shape) == (0, (sets, 3, 160, 5))
    assert first.kept.shape[2] + 6 == kept
    assert len({tuple(sorted(row)) for row in first.kept.flatten(0, 1).tolist()}) == 3 * sets
    # A single token takes the slot of one that goes before it, a block is cut after it.
    single = range(12) if block == 1 else range(11, 12) if block == 11 else ()
    after = [at for at in range(block, 12, block) if block > 1 and is_over(budget, at, block)]
    starts = [decision.at for decision in rollout.decisions]
    assert starts == [0, *sorted([*after, *(at for at in single if at in starts[1:])])]
    assert share == 0.9 or block > 1 or len(starts) > 8


def is_over(budget: Budget, at: int, block: int) -> bool:
    """Whether a block that ends at a token of the continuation is over the budget."""
    return kept_before(budget, at, block) + block > budget.tokens(160 + at)


def kept_before(budget: Budget, at: int, block: int) -> int:
    """Tokens held before the block that ends at a token of the continuation of 160."""
    held = budget.tokens(160)
    for end in range(block, at, block):
        held = min(held + block, budget.tokens(160 + end))
    return held


def test_a_choice_is_judged_by_what_comes_after_it():
    learner = PolicyLearner(attached(), TinyCorpus(), DistillSettings(discount=0, horizon=8))
    features = torch.rand(1, 2, 9, 5, generator=torch.Generator().manual_seed(0))
    candidates, held = torch.ones(1, 2, 9, dtype=torch.bool), torch.tensor([[9, 9]])
    kept = torch.tensor([[[0, 1], [2, 3]]])
    choices = [Decision(at, features, held, candidates, kept) for at in (0, 5)]
    divergences = torch.zeros(2, 8)
    divergences[0, 5] = 1.0

    def gradient(*decisions: Decision) -> torch.Tensor:
        learner._running = torch.zeros(3)
        learner.module.zero_grad()
        learner._reinforce(Rollout(decisions, divergences))[0].backward()
        return learner.module.layers[0].weight.grad.clone()

    learner.settings = replace(learner.settings, entropy_bonus=0.0)
    assert gradient(choices[0]).abs().max() == 0
    assert gradient(choices[1]).abs().max() > 0


def test_a_prompt_within_the_budget_teaches_nothing():
    learner = PolicyLearner(attached(), TinyCorpus(), SMALL)
    with pytest.raises(ConfigError, match="nothing to learn"):
        learner._reinforce(Rollout((), torch.zeros(2, 8)))


def test_a_continuation_of_one_token():
    network = PolicyNetwork(generator=torch.Generator().manual_seed(0))
    rollout = student(61, 1, Budget(0.3, "ratio")).roll_out(network, block=1)
    assert [decision.at for decision in rollout.decisions] == [0, 0]
    assert rollout.divergences.shape == (1, 1)


def test_a_rollout_that_keeps_everything_says_the_same():
    network = PolicyNetwork(generator=torch.Generator().manual_seed(0))
    rollout = student(72, 12, Budget(500, "tokens")).roll_out(network, rollouts=2, block=4)
    assert rollout.divergences.max() < 1e-5


@pytest.mark.parametrize("scope", ["layer", "token"])
@pytest.mark.parametrize("whole", [0.0, 0.25])
def test_a_rollout_equals_the_methods_own_cache(tmp_path: Path, scope: Scope, whole: float):
    model, tokens, budget = attached(), tiny_ids(1, 72), Budget(0.5, "ratio")
    network = PolicyNetwork(generator=torch.Generator().manual_seed(3))
    importance = torch.tensor([[0.1, 0.4], [0.2, 0.3], [0.0, 0.0]])
    artifact = PolicyArtifact(network, importance, "tiny", shape_facts(model), {})
    artifact.save_pretrained(tmp_path)
    options = {"sinks": 2, "recent": 4, "scope": scope, "whole": whole, "every": 1}
    cache = kvfold.make_cache(model, "distill", budget=budget, policy=str(tmp_path), **options)
    kvfold.prefill(model, tokens[:, :60], cache)
    text = Text(model, tokens[0], 12)
    pruned = text.student(Keeping(scope, 2, 4), plan_heads(importance, budget, whole))
    rollout = pruned.roll_out(network, block=1)
    assert rollout.divergences.max() > 1e-3
    expected = text.expected.log_softmax(-1)
    for step in range(12):
        logits = kvfold.prefill(model, tokens[:, 60 + step : 61 + step], cache)[0].log_softmax(-1)
        divergence = (expected[step].exp() * (expected[step] - logits)).sum()
        assert_close(rollout.divergences[:1, step], divergence[None], 1e-3)


def test_the_attention_to_come_is_the_continuations_own():
    tokens = tiny_ids(1, 72)
    plain = tiny_model(attn_implementation="eager")
    with torch.no_grad():
        output = plain(tokens, output_attentions=True)
    layers = [layer[0, :, -12:, :60].mean((0, 1)) for layer in output.attentions]
    text = Text(attached(), tokens[0], 12)
    for scope, expected in (("layer", layers), ("token", [torch.stack(layers).mean(0)])):
        pruned = text.student(Keeping(scope, 2, 4), HeadPlan({}, Budget(0.3, "ratio")))
        assert_close(pruned.mass_to_come(), torch.stack(expected), 1e-4)


def run(folder: Path, steps: int = 6, **options: object):
    settings = TrainingSettings(steps=steps, validate_every=2, checkpoint_every=1)
    return train_policy(attached(), TinyCorpus(), folder, settings, SMALL, **options)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path):
    whole = run(tmp_path / "whole")

    def stop(progress: object) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", on_progress=stop)
    resumed = run(tmp_path / "parts", resume=True)
    for name, weight in whole.artifact.network.state_dict().items():
        assert torch.equal(resumed.artifact.network.state_dict()[name], weight), name
    assert torch.equal(resumed.artifact.importance, whole.artifact.importance)
    assert whole.artifact.importance.abs().max() > 0
    kept = ("curve", "best_step", "best_metrics")
    assert all(resumed.artifact.record[k] == whole.artifact.record[k] for k in kept)
    assert whole.curve.read_bytes().startswith(b"\x89PNG")
    assert whole.policy.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"budgets": ()},
        {"budgets": (0.25, 1.0)},
        {"horizon": 0},
        {"block": 99},
        {"rollouts": 0},
        {"discount": 1.5},
        {"clip": 0.0},
        {"features": ("height",)},
        {"features": ()},
        {"scope": "head"},
        {"whole": 1.5},
        {"importance_texts": -1},
    ],
)
def test_settings_that_cannot_be_trained_with_are_refused(wrong: dict):
    with pytest.raises(ConfigError):
        PolicyLearner(attached(), TinyCorpus(), DistillSettings(**wrong))


def test_processes_learn_from_texts_of_their_own(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    excerpt = TinyCorpus.excerpt

    def watched(self: TinyCorpus, index: int, split: str) -> Excerpt:
        asked.append(index)
        return excerpt(self, index, split)

    learners = [
        PolicyLearner(attached(), TinyCorpus(), SMALL, process=process, processes=2)
        for process in (0, 1)
    ]
    monkeypatch.setattr(TinyCorpus, "excerpt", watched)
    for index in range(2):
        for learner in learners:
            learner.step(index, torch.Generator().manual_seed(0))
    assert asked == [0, 1, 2, 3]


def test_a_model_with_nothing_to_evict_is_refused():
    with pytest.raises(UnsupportedModelError, match="no full-attention layer"):
        PolicyLearner(attached("mistral_window"), TinyCorpus(), SMALL)
