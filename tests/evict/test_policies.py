"""Each policy against what it says, in loops and float64: tokens as a dictionary of positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import kvfold
from kvfold.attention import Scoring
from kvfold.budget import Budget
from kvfold.evict import POLICIES, EvictingLayer, Eviction, NewTokens, Policy
from kvfold.evict.policies import H2O, TOVA, Distill, KeyNorm, Random, SnapKV, Streaming
from kvfold.evict.policies.random import hashed_uniform
from tests.contract import left_padded, teacher_forced
from tests.tiny import tiny_ids, tiny_model

HEADS, GROUPS, WIDTH, BUDGET, SINKS, RECENT = 4, 2, 8, 16, 2, 5
REPEATS = HEADS // GROUPS


@dataclass
class SlowHead:
    """One kv head: the tokens it holds, and what the policy thinks of each."""

    policy: Policy
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    noted: dict[int, float] = field(default_factory=dict)

    def look(self, queries: dict[int, torch.Tensor], *, pooled: bool) -> None:
        """Learn from the attention of queries `[R, D]` by position, each over what it may see."""
        mass = dict.fromkeys(self.keys, 0.0)
        for position, query in queries.items():
            seen = [p for p in self.keys if p <= position]
            scores = query.double() @ torch.stack([self.keys[p].double() for p in seen]).T
            weights = (scores * WIDTH**-0.5).softmax(-1).mean(0)
            last = dict(zip(seen, weights.tolist(), strict=True))
            mass = {p: mass[p] + last.get(p, 0.0) for p in self.keys}
        if isinstance(self.policy, H2O):
            self.noted = {p: self.noted.get(p, 0.0) + mass[p] for p in self.keys}
        elif isinstance(self.policy, TOVA):
            self.noted = mass
        elif isinstance(self.policy, SnapKV):
            self.fade(mass, len(queries), pooled=pooled)

    def fade(self, mass: dict[int, float], count: int, *, pooled: bool) -> None:
        window, reach = self.policy.queries, self.policy.kernel // 2
        order = sorted(self.keys)
        fresh = {
            p: max(mass[q] for q in order[max(0, i - reach) : i + reach + 1]) if pooled else mass[p]
            for i, p in enumerate(order)
        }
        stays = 1 - min(count, window) / window
        self.noted = {p: self.noted.get(p, 0.0) * stays + fresh[p] / window for p in order}

    def score(self, position: int) -> float:
        if isinstance(self.policy, Streaming):
            return float(position)
        if isinstance(self.policy, KeyNorm):
            return -float(self.keys[position].double().norm())
        return self.noted[position]

    def drop(self, position: int) -> None:
        del self.keys[position]
        self.noted.pop(position, None)


class SlowLayer:
    """All kv heads of one row under a budget in tokens."""

    def __init__(self, policy: Policy, *, shared: bool):
        self.heads = [SlowHead(policy) for _ in range(GROUPS)]
        self.shared, self.window, self.seen = shared, policy.window, 0

    def worst(self, head: SlowHead) -> int:
        """The unprotected token of lowest score, over all heads where they share the set."""
        first, last = min(SINKS, BUDGET // 4), self.seen - min(RECENT, BUDGET // 2)
        free = [p for p in head.keys if first <= p < last]
        asked = self.heads if self.shared else [head]
        return min(free, key=lambda p: (sum(h.score(p) for h in asked), p))

    def evict(self, room: int) -> None:
        while len(self.heads[0].keys) > room:
            worst = [self.worst(head) for head in self.heads]
            for head, position in zip(self.heads, worst, strict=True):
                head.drop(position)

    def step(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """New tokens: query `[H, N, D]`, key `[G, N, D]`."""
        count, start = key.shape[1], self.seen
        if count == 1 and start:
            self.evict(BUDGET - 1)
        self.seen += count
        asked = range(max(0, count - self.window), count)
        for group, head in enumerate(self.heads):
            head.keys |= {start + i: key[group, i] for i in range(count)}
            rows = slice(group * REPEATS, (group + 1) * REPEATS)
            if self.window:
                head.look({start + i: query[rows, i] for i in asked}, pooled=count > 1)
        if count > 1:
            self.evict(BUDGET)


CASES = [
    (H2O(queries=6), "head"),
    (H2O(queries=64), "layer"),
    (SnapKV(queries=4, kernel=3), "head"),
    (SnapKV(queries=8, kernel=5), "layer"),
    (TOVA(), "layer"),
    (TOVA(), "head"),
    (KeyNorm(), "head"),
    (KeyNorm(), "layer"),
    (Streaming(), "layer"),
]


def layer_of(policy: Policy, scope: str) -> EvictingLayer:
    return EvictingLayer(Eviction(policy, Budget.parse(BUDGET), scope, SINKS, RECENT, layers=1))


def feed(layer: EvictingLayer, query: torch.Tensor, key: torch.Tensor) -> None:
    """One forward of new tokens through a layer, `[1, H, N, D]` and `[1, G, N, D]`."""
    layer.update(key, key.clone())
    layer.attend(query, None, Scoring(WIDTH**-0.5))


@pytest.mark.parametrize(("policy", "scope"), CASES, ids=str)
def test_keeps_what_the_loop_keeps(policy: Policy, scope: str):
    layer, slow = layer_of(policy, scope), SlowLayer(policy, shared=scope == "layer")
    generator = torch.Generator().manual_seed(0)
    for count in [30, *[1] * 20, 9, 3, *[1] * 10]:
        query = torch.randn(1, HEADS, count, WIDTH, generator=generator) * 2
        key = torch.randn(1, GROUPS, count, WIDTH, generator=generator)
        feed(layer, query, key)
        slow.step(query[0], key[0])
        held = layer.slots.positions[0].expand(GROUPS, -1)
        for group, head in enumerate(slow.heads):
            assert sorted(held[group].tolist()) == sorted(head.keys)
        if layer.slots.fields == ("mass",):
            for group, head in enumerate(slow.heads):
                expected = torch.tensor([head.noted[p] for p in held[group].tolist()])
                mass = layer.slots.field("mass")[0, group]
                torch.testing.assert_close(mass, expected, rtol=1e-4, atol=1e-6)


def test_every_policy_is_compared_with_a_loop():
    # Distill needs all layers at once: tests/evict/test_distill.py.
    compared = {type(policy) for policy, _ in CASES} | {Random, Distill}
    registered = {POLICIES[name] for name in POLICIES if POLICIES[name].evicts}
    assert compared == registered


def test_streaming_keeps_exactly_the_sinks_and_the_newest():
    layer = layer_of(Streaming(), "layer")
    for count in [30, *[1] * 25]:
        feed(layer, torch.randn(1, HEADS, count, WIDTH), torch.randn(1, GROUPS, count, WIDTH))
        newest = range(layer.seen - (BUDGET - SINKS), layer.seen)
        assert sorted(layer.slots.positions[0, 0].tolist()) == [0, 1, *newest]


def test_random_scores_are_uniform_and_depend_on_seed_and_head():
    numbers = torch.arange(100_000)
    scores = hashed_uniform(numbers, 0)
    assert 0 <= scores.min() < 1e-3
    assert 1 - 1e-3 < scores.max() < 1
    counts = torch.histc(scores, 10, 0, 1)
    assert (counts - 10_000).abs().max() < 400  # four standard deviations
    correlations = torch.corrcoef(
        torch.stack([scores, hashed_uniform(numbers, 1), hashed_uniform(numbers + 1, 0)])
    )
    assert (correlations - torch.eye(3)).abs().max() < 0.02


def test_random_keeps_the_hashed_best():
    layer = layer_of(Random(seed=3), "head")
    feed(layer, torch.randn(1, HEADS, 40, WIDTH), torch.randn(1, GROUPS, 40, WIDTH))
    for group in range(GROUPS):
        middle = range(SINKS, 40 - RECENT)
        score = dict(zip(middle, hashed_uniform(torch.tensor(middle) * 131 + group, 3).tolist(),
                         strict=True))  # fmt: skip
        best = sorted(middle, key=score.__getitem__)[-(BUDGET - SINKS - RECENT) :]
        expected = [*range(SINKS), *sorted(best), *range(40 - RECENT, 40)]
        assert layer.slots.positions[0, group].tolist() == expected


def test_a_policy_notes_every_new_token_however_small_its_window():
    class Both(H2O):
        """Looks at one query, and notes the position of each new token."""

        window = 1
        fields = ("mass", "place")

        def start(self, tokens: NewTokens) -> dict[str, torch.Tensor]:
            return {"place": tokens.positions[:, None].expand(tokens.keys.shape[:3])}

    layer = layer_of(Both(), "head")
    for count in (10, 3, 1, 1):
        feed(layer, torch.randn(1, HEADS, count, WIDTH), torch.randn(1, GROUPS, count, WIDTH))
        place = layer.slots.field("place")
        assert torch.equal(place, layer.slots.positions.float().expand_as(place))


@pytest.mark.parametrize("method", ["distill", "streaming"])
def test_of_few_tokens_some_can_always_go_and_the_first_stays(method: str):
    """Storage grows as many tokens late as there are layers: meanwhile fewer are protected."""
    model = tiny_model(num_hidden_layers=16)
    kvfold.attach(model)
    prompts, follow = tiny_ids(2, 12), tiny_ids(2, 60, seed=1)
    mask = left_padded([12, 5], 12)
    batch = kvfold.make_cache(model, method, budget=0.2)
    together = teacher_forced(model, batch, prompts, follow, mask=mask)
    single = kvfold.make_cache(model, method, budget=0.2)
    alone = teacher_forced(model, single, prompts[1:, 7:], follow[1:])
    assert torch.allclose(together[1], alone[0], atol=1e-4)
    assert all((part.slots.positions == 0).any(-1).all() for part in single.parts)
