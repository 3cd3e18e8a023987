"""Handing over without a codec: exact where it should be, and the bytes that travelled."""

import pytest
import torch

import kvfold
from kvfold.cache import prefill
from kvfold.errors import ConfigError
from kvfold.ops.divergence import kl_divergence
from kvfold.transfer.baselines import BASELINES, hand_over_by
from kvfold.transfer.endpoint import Endpoint
from tests.contract import left_padded, teacher_forced
from tests.tiny import tiny_ids
from tests.transfer.pairs import continued, tiny_pair

IDS, FOLLOW = tiny_ids(1, 40), tiny_ids(1, 12, seed=1)
NUMBERS = 40 * 2 * 2 * 16
"""Keys and values of a layer."""


@pytest.fixture(scope="module")
def pair() -> tuple[Endpoint, Endpoint]:
    base, other = tiny_pair()
    return Endpoint(base), Endpoint(other)


def logits(consumer: Endpoint, cache) -> torch.Tensor:
    return continued(consumer.model, cache, FOLLOW)


def own(consumer: Endpoint) -> torch.Tensor:
    cache = kvfold.make_cache(consumer.model, "full")
    prefill(consumer.model, IDS, cache)
    return logits(consumer, cache)


def lost(name, producer: Endpoint, consumer: Endpoint, **options) -> float:
    found = hand_over_by(name, producer, consumer, IDS, **options)
    return float(kl_divergence(own(consumer), logits(consumer, found.cache)).mean())


def test_the_oracle_is_the_consumers_own_cache(pair):
    found = hand_over_by("oracle", *pair, IDS)
    torch.testing.assert_close(logits(pair[1], found.cache), own(pair[1]), rtol=1e-4, atol=1e-4)
    assert found.payload == 0


@pytest.mark.parametrize("name", BASELINES[1:5])
def test_one_model_on_both_sides_loses_only_bits(pair, name):
    _, consumer = pair
    bound = {"raw": 1e-4, "rerotated": 1e-4, "int8": 1e-3, "int4": 0.3}[name]
    assert lost(name, consumer, consumer) < bound


def test_payloads(pair):
    expected = {
        "raw": 3 * NUMBERS * 2,
        "rerotated": 3 * NUMBERS * 2,
        "int8": 3 * (NUMBERS + 40 * 4 * 2),
        "int4": 3 * (NUMBERS // 2 + 40 * 4 * 2),
    }
    for name, payload in expected.items():
        assert hand_over_by(name, *pair, IDS).payload == payload
    recomputed = hand_over_by("recompute", *pair, IDS, layers=range(1, 3))
    assert recomputed.payload == NUMBERS * 2 + 40 * 64 * 2


def test_fewer_bits_lose_more(pair):
    losses = [lost(name, *pair) for name in ("rerotated", "int8", "int4")]
    assert losses[0] <= 1.01 * losses[1] < losses[2]


def test_raw_keys_are_turned_by_the_producers_angles():
    base, other = (Endpoint(model) for model in tiny_pair(drift=0.0, theta=1e6))
    plain = kvfold.make_cache(base.model, "full")
    prefill(base.model, IDS, plain)
    raw = hand_over_by("raw", base, other, IDS).cache
    torch.testing.assert_close(raw.layers[0].keys, plain.layers[0].keys, rtol=1e-2, atol=1e-2)
    turned = hand_over_by("rerotated", base, other, IDS).cache
    assert float((turned.layers[0].keys - raw.layers[0].keys).norm()) > 0.1


def test_recomputing_all_layers_is_the_consumer_but_for_the_embedding():
    producer, consumer = (Endpoint(model) for model in tiny_pair())
    with torch.no_grad():
        consumer.model.model.embed_tokens.weight.copy_(producer.model.model.embed_tokens.weight)
    found = hand_over_by("recompute", producer, consumer, IDS, layers=range(3))
    torch.testing.assert_close(logits(consumer, found.cache), own(consumer), rtol=1e-4, atol=1e-4)


def test_recomputing_gives_those_layers_the_consumers_weights(pair):
    producer, consumer = pair
    assert lost("recompute", producer, consumer, layers=range(1, 3)) < lost("rerotated", *pair)
    layers = producer.model.model.layers
    assert all(not layer._forward_pre_hooks for layer in layers)


def test_padded_rows(pair):
    ids, mask = tiny_ids(2, 40), left_padded([40, 17], 40)
    follow = tiny_ids(2, 4, seed=1)
    longer = torch.cat([mask, mask.new_ones(2, 1)], 1)
    for name in BASELINES:
        options = {"layers": range(1, 2)} if name == "recompute" else {}
        both = hand_over_by(name, *pair, ids, mask=mask, **options).cache
        alone = hand_over_by(name, *pair, ids[1:, 23:], **options).cache
        found = teacher_forced(pair[1].model, both, follow[:, :1], follow[:, 1:], mask=longer)[1]
        single = follow[1:]
        expected = teacher_forced(pair[1].model, alone, single[:, :1], single[:, 1:])[0]
        assert float(kl_divergence(expected, found).max()) < 2e-2


def test_what_is_no_baseline_is_refused(pair):
    with pytest.raises(ConfigError, match="no baseline 'other'"):
        hand_over_by("other", *pair, IDS)
    for layers in (None, range(0), range(2, 5), range(0, 3, 2)):
        with pytest.raises(ConfigError, match="recompute needs layers in a row"):
            hand_over_by("recompute", *pair, IDS, layers=layers)


def test_padding_that_all_rows_share_keeps_its_columns():
    base, other = tiny_pair()
    mask = left_padded([8, 5], 12)
    for name in ("oracle", "rerotated", "recompute"):
        layers = range(1, 2) if name == "recompute" else None
        ends = Endpoint(base), Endpoint(other)
        handed = hand_over_by(name, *ends, tiny_ids(2, 12), mask=mask, layers=layers)
        assert handed.cache.get_seq_length() == 12
