"""Codes decoded into caches that keep less: as a prompt fills them, or refused."""

import pytest
import torch

import kvfold
from kvfold.cache import prefill
from kvfold.errors import ConfigError, TransferError
from kvfold.evict.policy import POLICIES
from kvfold.transfer import Consumer, ConsumerSettings
from tests.contract import left_padded
from tests.tiny import tiny_ids
from tests.transfer.codecs import quick_codec
from tests.transfer.pairs import continued, tiny_pair, tiny_texts

TAKEN = ("full", "streaming", "knorm", "random")


@pytest.fixture(scope="module")
def base():
    return tiny_pair()[0]


@pytest.fixture(scope="module")
def exact(base):
    """A model to itself, with nothing left out."""
    return quick_codec(base, base, tiny_texts(4))


def budget_of(method: str) -> float | None:
    return None if method == "full" else 0.4


def test_every_method_is_taken_or_refused(base, exact):
    message, found = exact.encode(base, tiny_ids(1, 40)), set()
    for method in kvfold.methods():
        into = kvfold.make_cache(base, method, budget=budget_of(method))
        try:
            exact.decode(base, message, into=into)
            found.add(method)
        except ConfigError as error:
            assert str(error).startswith(f"{method} cannot be filled from codes")
            assert into.get_seq_length() == 0
    assert found == set(TAKEN)


@pytest.mark.parametrize("method", TAKEN)
@pytest.mark.parametrize("scope", ["head", "layer", "token"])
def test_it_is_filled_as_a_prompt_fills_it(base, exact, method: str, scope: str):
    if scope not in POLICIES[method].scopes:
        pytest.skip("not defined for the scope")
    ids, follow = tiny_ids(1, 60), tiny_ids(1, 12, seed=1)
    budget = budget_of(method)
    own, into = (kvfold.make_cache(base, method, budget=budget, scope=scope) for _ in range(2))
    prefill(base, ids, own)
    cache = exact.decode(base, exact.encode(base, ids), ids=ids, into=into)
    assert cache is into
    assert cache.report().tokens_kept == own.report().tokens_kept
    for mine, theirs in zip(cache.parts, own.parts, strict=True):
        assert torch.equal(mine.slots.positions, theirs.slots.positions)
    expected, found = (continued(base, held, follow) for held in (own, cache))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_sliding_layers_and_padded_rows_are_filled_too():
    base, _ = tiny_pair("gemma3")
    codec = quick_codec(base, base, tiny_texts(4))
    ids, mask = tiny_ids(2, 40), left_padded([40, 23], 40)
    own, into = (kvfold.make_cache(base, "streaming", budget=12) for _ in range(2))
    prefill(base, ids, own, attention_mask=mask.long())
    codec.decode(base, codec.encode(base, ids, mask=mask), ids=ids, mask=mask, into=into)
    for mine, theirs in zip(into.parts, own.parts, strict=True):
        assert torch.equal(mine.slots.positions, theirs.slots.positions)
        held = (theirs.slots.positions >= 0)[..., None]
        torch.testing.assert_close(
            mine.slots.keys * held, theirs.slots.keys * held, rtol=1e-3, atol=1e-3
        )


def test_a_damaged_message_leaves_the_cache_empty(base, exact):
    message = exact.encode(base, tiny_ids(1, 40))
    into = kvfold.make_cache(base, "streaming", budget=16)
    for broken in (message[:-1], message[:-5] + b"abcde"):
        with pytest.raises(TransferError):
            exact.decode(base, broken, into=into)
        assert into.get_seq_length() == 0
    assert exact.decode(base, message, into=into).report().tokens_kept == [16] * 3


def test_a_used_or_foreign_cache_is_refused(base, exact):
    message = exact.encode(base, tiny_ids(1, 10))
    used = kvfold.make_cache(base, "streaming", budget=16)
    prefill(base, tiny_ids(1, 5), used)
    with pytest.raises(ConfigError, match="has seen 5 tokens already"):
        exact.decode(base, message, into=used)
    other = tiny_pair()[0]
    with pytest.raises(ConfigError, match="made for another model"):
        exact.decode(base, message, into=kvfold.make_cache(other, "streaming"))


def test_a_consumer_without_producer_fills_the_same_cache(base, exact, free_port: int):
    consumer = Consumer(exact.receiver(base), ConsumerSettings(port=free_port))
    into = kvfold.make_cache(base, "knorm", budget=16)
    answer = consumer.prefix(tiny_ids(1, 40), into=into)
    assert (answer.source, answer.cache is into) == ("own", True)
    assert into.report().tokens_kept == [16] * 3
    with pytest.raises(ConfigError, match="snapkv cannot be filled from codes"):
        consumer.prefix(tiny_ids(1, 40), into=kvfold.make_cache(base, "snapkv"))


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]
