"""The learned policy: what goes is what its network scores lowest, in turns or one by one."""

import pytest
import torch

import kvfold
from kvfold.cache import KVCache
from kvfold.errors import ConfigError
from tests.contract import (
    assert_close,
    attached,
    features_of,
    held_positions,
    left_padded,
    teacher_forced,
)
from tests.tiny import tiny_ids, tiny_model

BUDGET, SINKS, RECENT = 24, 2, 6


def distill(**options: object) -> KVCache:
    options = {"budget": BUDGET, "sinks": SINKS, "recent": RECENT, **options}
    return kvfold.make_cache(attached(), "distill", **options)


def held(cache: KVCache, layer: int) -> set[int]:
    return set(held_positions(cache)[layer][0][0])


def scores(cache: KVCache, layer: int) -> dict[int, float]:
    """The network's score of each token that may go, by position, a token at a time."""
    policy, slots = cache.parts[0].eviction.policy, [part.slots for part in cache.parts]
    mine = slots if cache.spec.scope == "token" else [slots[layer]]
    network, features = policy.artifact.network, policy.features(mine)[0]
    seen, count = cache.get_seq_length(), torch.tensor([features.shape[0]])
    with torch.no_grad():
        every = [
            float(network.score(network.compress(features[None, slot : slot + 1], count)))
            for slot in range(features.shape[0])
        ]
    named = dict(zip(mine[0].positions[0, 0].tolist(), every, strict=True))
    return {p: s for p, s in named.items() if SINKS <= p < seen - RECENT}


def lowest(cache: KVCache, layer: int, count: int) -> list[int]:
    candidates = scores(cache, layer)
    return sorted(candidates, key=lambda position: candidates[position])[:count]


@pytest.mark.parametrize("scope", ["layer", "token"])
@pytest.mark.parametrize(
    ("every", "budget", "turns"), [(1, BUDGET, 1), (3, BUDGET, 3), (8, BUDGET, 8), (2, 64, 4)]
)
def test_the_lowest_scores_go_in_turn(every: int, budget: int, turns: int, scope: str):
    """In turns of `every`, or of a 16th of what is held where that is more."""
    model, tokens = attached(), tiny_ids(1, 100)
    cache = distill(every=every, scope=scope, budget=budget)
    whole = kvfold.make_cache(
        model, "distill", budget=1000, sinks=SINKS, recent=RECENT, scope=scope
    )
    kvfold.prefill(model, tokens[:, :70], whole)
    kvfold.prefill(model, tokens[:, :70], cache)
    layers = range(len(cache.parts))
    cut = 70 - budget
    # The cut's own scores serve for the first tokens, for fewer in some layers than in others.
    shift = turns // every
    first = [1 + (layer if scope == "layer" else 0) % every * shift for layer in layers]
    waiting = [
        lowest(whole, layer, cut + first[layer])[cut:] if every > 1 else [] for layer in layers
    ]
    kept = set()
    for step in range(70, 100):
        for layer in layers:
            waiting[layer] = waiting[layer] or lowest(cache, layer, turns)
        before = [held(cache, layer) for layer in layers]
        kept.add(len({tuple(sorted(each)) for each in before}))
        kvfold.prefill(model, tokens[:, step : step + 1], cache)
        for layer in layers:
            assert before[layer] - held(cache, layer) == {waiting[layer].pop(0)}
            assert step in held(cache, layer)
    assert (kept == {1}) == (scope == "token")


@pytest.mark.parametrize("scope", ["layer", "token"])
def test_a_prompt_is_cut_to_the_highest_scores(scope: str):
    model, tokens = attached(), tiny_ids(1, 60)
    whole = kvfold.make_cache(
        model, "distill", budget=1000, sinks=SINKS, recent=RECENT, scope=scope
    )
    kvfold.prefill(model, tokens, whole)
    cache = distill(scope=scope)
    kvfold.prefill(model, tokens, cache)
    for layer in range(len(cache.parts)):
        assert held(cache, layer) == set(range(60)) - set(lowest(whole, layer, 60 - BUDGET))


@pytest.mark.parametrize(("every", "budget", "short"), [(5, 0.4, 21), (2, 0.9, 45)])
def test_scoring_rarely_is_the_same_for_a_row_in_a_batch(every: int, budget: float, short: int):
    model, prompt, follow = attached(), tiny_ids(2, 80), tiny_ids(2, 40, seed=1)
    batch = kvfold.make_cache(model, "distill", budget=budget, every=every)
    together = teacher_forced(model, batch, prompt, follow, mask=left_padded([80, short], 80))
    single = kvfold.make_cache(model, "distill", budget=budget, every=every)
    alone = teacher_forced(model, single, prompt[1:, 80 - short :], follow[1:])
    assert torch.allclose(together[1], alone[0], atol=1e-5)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_an_interval_that_cannot_be_is_refused(every: object):
    with pytest.raises(ConfigError, match="every is"):
        distill(every=every)


@pytest.mark.parametrize("budget", [0.4, 24], ids=str)
@pytest.mark.parametrize("kind", ["gemma3", "mistral_window", "qwen3", "smollm3"])
def test_a_padded_row_equals_a_single_run_in_other_families(kind: str, budget: float | int):
    model, prompt, follow = attached(kind), tiny_ids(2, 60), tiny_ids(2, 30, seed=1)
    batch = kvfold.make_cache(model, "distill", budget=budget, every=3)
    together = teacher_forced(model, batch, prompt, follow, mask=left_padded([60, 31], 60))
    for row, length in enumerate([60, 31]):
        single = kvfold.make_cache(model, "distill", budget=budget, every=3)
        rows = slice(row, row + 1)
        alone = teacher_forced(model, single, prompt[rows, 60 - length :], follow[rows])
        assert_close(together[row], alone[0])
        assert [layer[row] for layer in held_positions(batch)] == [
            layer[0] for layer in held_positions(single)
        ]
    assert bool(batch.own_layers) == (kind != "mistral_window")


@pytest.mark.parametrize("padded", [False, True])
def test_bfloat16_sees_the_features_of_float32(padded: bool):
    mask = left_padded([60, 41], 60) if padded else None
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(gain=1.0).to(dtype)
        kvfold.attach(model)
        # Nothing goes, so that both hold the same tokens in the same slots.
        cache = kvfold.make_cache(model, "distill", budget=1000, scope="token")
        teacher_forced(model, cache, tiny_ids(2, 60), tiny_ids(2, 20, seed=1), mask=mask)
        features = features_of(cache)
        assert features.dtype == torch.float32
        found.append((features, cache.own_layers[0].slots.positions[:, 0]))
    (exact, positions), (rounded, same) = found
    assert torch.equal(positions, same)
    is_token = positions >= 0
    scale = exact[is_token].abs().amax(0)
    assert ((rounded - exact)[is_token].abs().amax(0) < 0.05 * scale).all()
