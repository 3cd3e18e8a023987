"""Logits equal those of a full cache with everything evicted masked out."""

import pytest
import torch

import kvfold
from tests.contract import EVICTING, assert_close, attached, held_positions
from tests.evict.oracle import Twin
from tests.tiny import tiny_ids


def follow(twin: Twin, tokens: torch.Tensor) -> None:
    """Both caches, one token after the other."""
    for step in range(tokens.shape[1]):
        assert_close(*twin.run(tokens[:, step : step + 1]))


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_prompt_and_decode(method: str, scope: str):
    model = attached()
    twin = Twin(model, kvfold.make_cache(model, method, budget=24, scope=scope))
    assert_close(*twin.run(tiny_ids(2, 60)))
    follow(twin, tiny_ids(2, 30, seed=1))
    assert twin.held.report().tokens_kept == [24, 24, 24]


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_chunked_prefill_with_a_growing_budget_and_a_second_turn(method: str, scope: str):
    model, prompt = attached(), tiny_ids(2, 57)
    twin = Twin(model, kvfold.make_cache(model, method, budget=0.4, scope=scope))
    for chunk in prompt.split(16, dim=1):
        assert_close(*twin.run(chunk))
    follow(twin, tiny_ids(2, 12, seed=1))
    assert_close(*twin.run(tiny_ids(2, 9, seed=2)))
    follow(twin, tiny_ids(2, 6, seed=3))
    assert max(twin.held.report().tokens_kept) <= 33  # 0.4 of 84


@pytest.mark.parametrize("kind", ["granite", "smollm3", "qwen3", "phi3", "olmo2"])
def test_other_families(kind: str):
    model = attached(kind)
    twin = Twin(model, kvfold.make_cache(model, "snapkv", budget=24))
    assert_close(*twin.run(tiny_ids(2, 60)))
    follow(twin, tiny_ids(2, 10, seed=1))


def test_heads_keep_different_tokens_and_what_is_evicted_matters():
    model, prompt, last = attached(), tiny_ids(1, 60), tiny_ids(1, 1, seed=1)
    held, full = (kvfold.make_cache(model, name) for name in ("random", "full"))
    for each in (held, full):
        kvfold.prefill(model, prompt, each)
    one, other = held_positions(held)[1][0]
    assert one != other
    actual, plain = (kvfold.prefill(model, last, each) for each in (held, full))
    assert (actual - plain).abs().max() > 1e-2 * plain.abs().max()


@pytest.mark.parametrize("method", ["h2o", "snapkv", "tova", "knorm", "random"])
def test_token_scope_holds_one_set_in_all_layers(method: str):
    model = attached()
    held = kvfold.make_cache(model, method, budget=0.3, scope="token")
    kvfold.prefill(model, tiny_ids(2, 50), held, chunk_size=20)
    for step in range(30):
        kvfold.prefill(model, tiny_ids(2, 1, seed=step), held)
        first, *others = (layer.slots.positions for layer in held.own_layers)
        assert all(torch.equal(first, other) for other in others)
