"""Heads that keep everything: which, how many, and caches in which heads do not all keep alike."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvfold
from kvfold.budget import Budget
from kvfold.cache import CacheSpec, KVCache
from kvfold.cache.split import SplitLayer
from kvfold.errors import ArtifactError, ConfigError
from kvfold.evict.artifact import PolicyArtifact
from kvfold.evict.build import kv_heads
from kvfold.evict.importance import head_importance
from kvfold.evict.network import PolicyNetwork
from kvfold.evict.rollout import Keeping, Text
from kvfold.evict.whole_heads import MOST, HeadPlan, plan_heads
from kvfold.models import shape_facts
from tests.contract import assert_close, attached, held_positions, left_padded, teacher_forced
from tests.evict.oracle import Twin
from tests.tiny import tiny_ids

IMPORTANCE = torch.tensor([[0.1, 0.5], [0.4, 0.45], [0.2, 0.0]])
"""Of the tiny models: at a budget of 60 %, heads (0, 1) and (1, 1) are the most that may stay."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("policy")
    save_policy(where, IMPORTANCE)
    return where


def save_policy(folder: Path, importance: torch.Tensor, kind: str = "llama") -> None:
    network = PolicyNetwork(generator=torch.Generator().manual_seed(0))
    facts = shape_facts(attached(kind))
    PolicyArtifact(network, importance, "tiny", facts, {}).save_pretrained(folder)


def whole(folder: Path, **options: object) -> KVCache:
    """A cache in which two heads keep everything, and the others 40 %."""
    options = {"budget": 0.6, "whole": 0.34, "sinks": 2, "recent": 4, **options}
    return kvfold.make_cache(attached(), "distill", policy=str(folder), **options)


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.floats(0.01, 0.99),
    st.floats(0, 1),
    st.integers(0, 2**32 - 1),
)
def test_the_mean_over_heads_is_the_budget(
    layers: int, heads: int, amount: float, share: float, seed: int
):
    importance = torch.randn(layers, heads, generator=torch.Generator().manual_seed(seed))
    plan = plan_heads(importance, Budget(amount, "ratio"), share)
    chosen = [(layer, head) for layer, own in plan.whole.items() for head in own]
    total, count = importance.numel(), len(chosen)
    assert count <= min(share, MOST * amount) * total + 1e-9
    assert count + plan.rest.amount * (total - count) == pytest.approx(amount * total)
    assert plan.rest.amount > 0
    worth = [float(importance[each]) for each in chosen]
    others = set(importance[importance > 0].tolist()) - set(worth)
    assert min(worth, default=9.0) >= max(others, default=0.0) or count == int(
        min(share, MOST * amount) * total
    )
    assert all(each > 0 for each in worth)
    assert max(others - set(worth), default=0.0) <= min(worth, default=9.0)


@pytest.mark.parametrize("budget", [Budget(64, "tokens"), Budget(9e6, "bytes")])
def test_budgets_that_do_not_grow_have_none(budget: Budget):
    assert plan_heads(IMPORTANCE, budget, 0.5) == HeadPlan({}, budget)


def test_the_most_important_heads_hold_every_token(folder: Path):
    model, cache = attached(), whole(folder)
    teacher_forced(model, cache, tiny_ids(1, 60), tiny_ids(1, 22, seed=1))
    kinds = [type(layer).__name__ for layer in cache.own_layers]
    assert kinds == ["SplitLayer", "SplitLayer", "EvictingLayer"]
    assert [layer.heads for layer in cache.own_layers[:2]] == [([0], [1]), ([0], [1])]
    first, its_whole, second, other_whole, last = held_positions(cache)
    assert its_whole == other_whole == [[list(range(82))]]
    # 40 % of 82 for each of the four others: together 60 % of all.
    assert [len(row[0][0]) for row in (first, second, last)] == [32, 32, 32]
    assert cache.report().tokens_kept == [57, 57, 32]


@pytest.mark.parametrize("scope", ["layer", "token"])
def test_logits_are_those_of_a_masked_full_cache(folder: Path, scope: str):
    twin = Twin(attached(), whole(folder, scope=scope))
    prompt = tiny_ids(2, 57)
    for chunk in (prompt[:, :30], prompt[:, 30:]):
        assert_close(*twin.run(chunk))
    for step in tiny_ids(2, 30, seed=1).split(1, dim=1):
        assert_close(*twin.run(step))
    assert_close(*twin.run(tiny_ids(2, 9, seed=2)))
    assert_close(*twin.run(tiny_ids(2, 1, seed=3)))


@pytest.mark.parametrize("scope", ["layer", "token"])
def test_a_padded_row_equals_a_single_run(folder: Path, scope: str):
    model, prompt, follow = attached(), tiny_ids(2, 60), tiny_ids(2, 40, seed=1)
    batch = whole(folder, scope=scope, every=5)
    together = teacher_forced(model, batch, prompt, follow, mask=left_padded([60, 31], 60))
    for row, length in enumerate([60, 31]):
        single = whole(folder, scope=scope, every=5)
        rows = slice(row, row + 1)
        alone = teacher_forced(model, single, prompt[rows, 60 - length :], follow[rows])
        assert_close(together[row], alone[0])


def divided(model: torch.nn.Module) -> KVCache:
    """A full cache whose heads are served by two layers each."""
    heads = list(range(kv_heads(model)))

    def make() -> SplitLayer:
        return SplitLayer(
            [(heads[::-2], kvfold.cache.CacheLayer()), (heads[-2::-2], kvfold.cache.CacheLayer())]
        )

    return KVCache(model, CacheSpec("full"), make)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3", "granite"])
@pytest.mark.parametrize("padded", [False, True])
def test_divided_heads_change_nothing(kind: str, padded: bool):
    model, prompt, follow = attached(kind), tiny_ids(2, 40), tiny_ids(2, 9, seed=1)
    mask = left_padded([40, 23], 40) if padded else None
    plain = kvfold.make_cache(model, "full")
    expected = teacher_forced(model, plain, prompt, follow, mask=mask, chunk_size=16)
    actual = teacher_forced(model, divided(model), prompt, follow, mask=mask, chunk_size=16)
    assert_close(actual, expected)


def test_every_change_of_a_cache_reaches_both_parts():
    model, cache, plain = attached(), divided(attached()), kvfold.make_cache(attached(), "full")
    for each in (cache, plain):
        kvfold.prefill(model, tiny_ids(3, 30), each)
        each.batch_repeat_interleave(2)
        each.reorder_cache(torch.tensor([5, 0, 1, 2, 3, 4]))
        each.batch_select_indices(torch.tensor([0, 4, 2]))
        each.crop(-7)
    fork = cache.fork()
    follow = tiny_ids(3, 1, seed=1)
    expected = kvfold.prefill(model, follow, plain)
    assert_close(kvfold.prefill(model, follow, cache), expected)
    assert fork.get_seq_length() == 23
    assert_close(kvfold.prefill(model, follow, fork), expected)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close(
        kvfold.prefill(model, follow, cache),
        kvfold.prefill(model, follow, kvfold.make_cache(model, "full")),
    )


def test_crop_is_refused_before_anything_changes(folder: Path):
    cache = whole(folder)
    kvfold.prefill(attached(), tiny_ids(1, 60), cache)
    with pytest.raises(ConfigError, match="evicted"):
        cache.crop(-3)
    assert {part.seen for part in cache.parts} == {60}


def test_a_saved_cache_goes_on_identically(folder: Path, tmp_path: Path):
    model, cache, more = attached(), whole(folder), tiny_ids(2, 20, seed=3)
    teacher_forced(model, cache, tiny_ids(2, 60), tiny_ids(2, 11, seed=1))
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvfold.load_cache(tmp_path / "cache.safetensors", model)
    assert held_positions(loaded) == held_positions(cache)
    first = tiny_ids(2, 1, seed=2)
    expected = teacher_forced(model, cache, first, more)
    assert torch.equal(teacher_forced(model, loaded, first, more), expected)


def test_a_saved_cache_is_not_read_into_other_heads(folder: Path, tmp_path: Path):
    save_policy(tmp_path, IMPORTANCE)
    cache = whole(tmp_path)
    kvfold.prefill(attached(), tiny_ids(1, 60), cache)
    cache.save(tmp_path / "cache.safetensors")
    save_policy(tmp_path, IMPORTANCE.flip(1))
    with pytest.raises(ArtifactError, match="other kv heads"):
        kvfold.load_cache(tmp_path / "cache.safetensors", attached())


@pytest.mark.parametrize("share", [-0.1, 1.1, True, "all"])
def test_a_share_that_cannot_be_is_refused(folder: Path, share: object):
    with pytest.raises(ConfigError, match="distill: whole is"):
        whole(folder, whole=share)


def test_the_importance_of_heads_adds_up_to_the_divergence():
    text = Text(attached(), tiny_ids(1, 92)[0], 12)
    budget, keeping = Budget(0.3, "ratio"), Keeping("layer", sinks=2, recent=4)
    pruned = text.student(keeping, HeadPlan({}, budget))
    kept = pruned.most_attended()
    assert kept.sum(-1).tolist() == [budget.tokens(80)] * 3
    found = text.head_importance(keeping, budget, clip=100.0)
    assert found.shape == (3, 2)
    whole = divergence(text, kept, torch.ones(3, 2, dtype=torch.bool))
    none = divergence(text, kept, torch.zeros(3, 2, dtype=torch.bool))
    assert whole < 1e-5 < 1e-2 < none
    # Three points of a curved way, and the continuation's own keys held fixed.
    assert float(found.sum()) == pytest.approx(none, rel=0.5)
    everything = torch.ones_like(kept)
    nothing = head_importance(
        text.model, text._full, text.continuation, text.expected, everything, clip=100.0
    )
    assert nothing.abs().max() < 1e-6


def divergence(text: Text, kept: torch.Tensor, full: torch.Tensor) -> float:
    """Mean divergence when some heads keep everything and the others what is kept."""
    from kvfold.cache.replay import replay
    from kvfold.evict.importance import _MixedLayer
    from kvfold.evict.rollout import _logits
    from kvfold.ops.divergence import kl_divergence

    cache = KVCache(text.model, CacheSpec("full"), _MixedLayer)
    replay(text._full, cache)
    for layer, shares, tokens in zip(cache.own_layers, full.float(), kept, strict=True):
        layer.mixing = (shares, tokens)
    logits = _logits(text.model, cache, text.continuation[None])[0]
    return float(kl_divergence(text.expected, logits).mean())
