"""Codes decoded into caches that keep less: as a prompt fills them, or refused."""

import functools

import pytest
import torch

import kvfold
from kvfold.cache import CACHE_KEYWORD, CacheLayer, CacheSpec, KVCache, prefill
from kvfold.cache.split import SplitLayer
from kvfold.errors import ConfigError, TransferError
from kvfold.evict.policy import POLICIES
from kvfold.transfer import Consumer, ConsumerSettings, ends
from kvfold.transfer.pour import queries_wanted
from kvfold.zoom.layer import ZoomLayer
from tests.contract import left_padded
from tests.tiny import tiny_ids
from tests.transfer.codecs import quick_codec
from tests.transfer.pairs import continued, tiny_pair, tiny_texts

TAKEN = ("full", "streaming", "knorm", "random")
"""They go by keys, values and positions alone."""
ASKING = {"h2o": 64, "snapkv": 32, "tova": 1, "distill": 64}
"""They go by so many last queries."""


@functools.cache
def exact_pair(kind: str):
    """A model, and a codec to itself that leaves nothing out."""
    base = tiny_pair(kind)[0]
    return base, quick_codec(base, base, tiny_texts(4))


@pytest.fixture(scope="module")
def base():
    return exact_pair("llama")[0]


@pytest.fixture(scope="module")
def exact(base):
    """A model to itself, with nothing left out."""
    return exact_pair("llama")[1]


def budget_of(method: str) -> float | None:
    return None if method == "full" else 0.4


def test_those_that_go_by_queries_need_the_token_ids(base, exact):
    message, found = exact.encode(base, tiny_ids(1, 40)), {}
    for method in kvfold.methods():
        into = kvfold.make_cache(base, method, budget=budget_of(method))
        try:
            exact.decode(base, message, into=into)
        except ConfigError as error:
            assert str(error).startswith(f"{method} goes by the queries of the last")
            assert into.get_seq_length() == 0
            found[method] = queries_wanted(into)
    assert found == ASKING | {"sekv": 64}


class Peeking(CacheLayer):
    """Looks at queries and does not say so."""

    def _settle(self, forward):
        self.longest = forward.query.norm(dim=-1).amax()


def test_a_layer_that_looks_at_queries_and_does_not_say_so_is_refused(base, exact):
    ids = tiny_ids(1, 40)
    into = KVCache(base, CacheSpec("mine"), Peeking)
    with pytest.raises(ConfigError, match="mine cannot be filled from codes"):
        exact.decode(base, exact.encode(base, ids), ids=ids, into=into)
    assert into.get_seq_length() == 0


@pytest.mark.parametrize("method", [*TAKEN, *ASKING])
@pytest.mark.parametrize("scope", ["head", "layer", "token"])
def test_it_is_filled_as_a_prompt_fills_it(base, exact, method: str, scope: str):
    if scope not in POLICIES[method].scopes:
        pytest.skip("not defined for the scope")
    ids, follow = tiny_ids(1, 110), tiny_ids(1, 12, seed=1)
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


@pytest.mark.parametrize("kind", ["gemma3", "gemma2"])
@pytest.mark.parametrize("method", ["streaming", *ASKING])
def test_sliding_layers_and_padded_rows_are_filled_too(kind: str, method: str):
    base, codec = exact_pair(kind)
    # One row begins in the window, one long before it, and no row at the first column.
    ids, mask = tiny_ids(2, 110), left_padded([100, 23], 110)
    own, into = (kvfold.make_cache(base, method, budget=12) for _ in range(2))
    prefill(base, ids, own, attention_mask=mask.long())
    codec.decode(base, codec.encode(base, ids, mask=mask), ids=ids, mask=mask, into=into)
    for mine, theirs in zip(into.parts, own.parts, strict=True):
        assert torch.equal(mine.slots.positions, theirs.slots.positions)
        held = (theirs.slots.positions >= 0)[..., None]
        torch.testing.assert_close(
            mine.slots.keys * held, theirs.slots.keys * held, rtol=1e-3, atol=1e-3
        )
    attended = torch.cat([mask.long(), torch.ones(2, 8, dtype=torch.long)], 1)
    follow = tiny_ids(2, 8, seed=1)
    expected, found = (prefill(base, follow, held, attention_mask=attended) for held in (own, into))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("method", "length"),
    [*((method, length) for method in ASKING for length in (1, 33, 65)), ("sekv", 64)],
)
def test_a_prefix_about_as_long_as_the_window(base, exact, method: str, length: int):
    ids, follow = tiny_ids(1, length), tiny_ids(1, 12, seed=1)
    own, into = (kvfold.make_cache(base, method, budget=0.9) for _ in range(2))
    prefill(base, ids, own)
    exact.decode(base, exact.encode(base, ids), ids=ids, into=into)
    for mine, theirs in zip(into.parts, own.parts, strict=True):
        assert torch.equal(mine.slots.positions, theirs.slots.positions)
    expected, found = (continued(base, held, follow) for held in (own, into))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_as_many_queries_as_an_option_says_are_read(base, exact):
    ids = tiny_ids(1, 160)
    own, into = (kvfold.make_cache(base, "h2o", budget=24, queries=100) for _ in range(2))
    prefill(base, ids, own)
    exact.decode(base, exact.encode(base, ids), ids=ids, into=into)
    for mine, theirs in zip(into.parts, own.parts, strict=True):
        torch.testing.assert_close(mine.slots.field("mass"), theirs.slots.field("mass"))


def test_heads_that_keep_everything_are_filled_beside_those_that_do_not(base, exact):
    """A layer in two parts, as the shipped policy of the default model makes them."""
    ids, follow = tiny_ids(1, 110), tiny_ids(1, 12, seed=1)
    own, into = (kvfold.make_cache(base, "snapkv", budget=24, scope="layer") for _ in range(2))
    for held in (own, into):
        held.layers[1] = SplitLayer([([1], held.own_layers[1]), ([0], CacheLayer())])
    prefill(base, ids, own)
    exact.decode(base, exact.encode(base, ids), ids=ids, into=into)
    assert [len(part.slots) for part in into.parts] == [24, 24, 110, 24]
    expected, found = (continued(base, held, follow) for held in (own, into))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_the_window_is_the_consumers_own_reading_however_coarse_the_codes(base):
    """Its tokens are exact in the first layer, whose input is known; the others are as sent."""
    coarse = quick_codec(base, base, tiny_texts(4), bits=4, rank=4)
    ids = tiny_ids(1, 110)
    own, into, plain = (
        kvfold.make_cache(base, method, budget=budget)
        for method, budget in (("full", None), ("snapkv", 80), ("full", None))
    )
    prefill(base, ids, own)
    message = coarse.encode(base, ids)
    coarse.decode(base, message, ids=ids, into=into)
    coarse.decode(base, message, ids=ids, into=plain)
    held = into.parts[0].slots
    where = held.positions.long()[..., None].expand_as(held.keys)
    read, sent = (cache.parts[0].slots.keys.gather(2, where) for cache in (own, plain))
    is_window = held.positions[..., None] >= 110 - 32
    assert int(is_window.sum()) == 2 * 32
    torch.testing.assert_close(held.keys, torch.where(is_window, read, sent))
    assert not torch.allclose(read[:, :, :8], sent[:, :, :8], rtol=0.1)


@pytest.mark.parametrize("routing", ["sketch", "summary"])
@pytest.mark.parametrize("lengths", [[200, 200], [200, 90]])
def test_sekv_divides_evenly_as_a_prompt_without_surprisal(
    base, exact, lengths: list[int], routing: str
):
    ids, mask = tiny_ids(2, 200), left_padded(lengths, 200)
    own, into = (kvfold.make_cache(base, "sekv", budget=0.3, routing=routing) for _ in range(2))
    with torch.no_grad():
        embedded = base.get_input_embeddings()(ids)
        positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
        given = {"attention_mask": mask.long(), "position_ids": positions, CACHE_KEYWORD: own}
        base(inputs_embeds=embedded, **given)
    exact.decode(base, exact.encode(base, ids, mask=mask), ids=ids, mask=mask, into=into)
    assert into.report().bytes_fast == own.report().bytes_fast
    for mine, theirs in zip(into.parts, own.parts, strict=True):
        assert torch.equal(mine.slots.positions, theirs.slots.positions)
        assert torch.equal(mine.spans.ends, theirs.spans.ends)
        torch.testing.assert_close(mine.spans.means, theirs.spans.means, rtol=1e-2, atol=1e-2)


def test_sekv_finds_directions_by_the_queries_of_the_window(base, exact, monkeypatch):
    """Those of padding, and of what came as codes, are nobody's."""
    ids, mask = tiny_ids(2, 70), left_padded([70, 30], 70)
    into, whole = (kvfold.make_cache(base, "sekv", budget=0.9) for _ in range(2))
    moments, prepare = [], ZoomLayer.prepare

    def noted(layer, fold):
        moments.append(layer.moment.clone())
        prepare(layer, fold)

    monkeypatch.setattr(ZoomLayer, "prepare", noted)
    exact.decode(base, exact.encode(base, ids, mask=mask), ids=ids, mask=mask, into=into)
    prefill(base, ids[:, :6], whole, attention_mask=mask[:, :6].long())
    before = [part.moment.clone() for part in whole.parts]
    prefill(base, ids[:, 6:], whole, attention_mask=mask.long())
    assert len(moments) == 6
    for mine, theirs, first in zip(moments[:3], moments[3:], before, strict=True):
        torch.testing.assert_close(mine, theirs - first, rtol=1e-3, atol=1e-3)


def test_sekv_that_expands_every_span_goes_on_as_the_full_cache(base, exact):
    ids, follow = tiny_ids(1, 200), tiny_ids(1, 12, seed=1)
    own = kvfold.make_cache(base, "full")
    into = kvfold.make_cache(base, "sekv", budget=0.98, directions=2)
    prefill(base, ids, own)
    exact.decode(base, exact.encode(base, ids), ids=ids, into=into)
    first = into.parts[0]
    assert 0 < len(first.spans) == first.expanded
    expected, found = (continued(base, held, follow) for held in (own, into))
    # Spans are held in half precision.
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


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
    with pytest.raises(ConfigError, match="made for another model"):
        exact.decode(base, message, into=kvfold.make_cache(other, "snapkv"))


@pytest.mark.parametrize("method", ["snapkv", "sekv"])
def test_a_reading_that_fails_leaves_the_cache_empty(base, exact, monkeypatch, method: str):
    ids = tiny_ids(1, 110)
    message, into = exact.encode(base, ids), kvfold.make_cache(base, method, budget=0.3)
    decode = ends.decode_layer

    def fail(coder, endpoint, layer, *rest):
        if layer == 2:
            raise RuntimeError("out of memory")
        return decode(coder, endpoint, layer, *rest)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
        patched.setattr(ends, "decode_layer", fail)
        exact.decode(base, message, ids=ids, into=into)
    assert into.get_seq_length() == 0
    exact.decode(base, message, ids=ids, into=into)
    assert into.get_seq_length() == 110


def test_a_consumer_without_producer_fills_the_same_cache(base, exact, free_port: int):
    consumer = Consumer(exact.receiver(base), ConsumerSettings(port=free_port))
    for method in ("knorm", "snapkv"):
        into = kvfold.make_cache(base, method, budget=16)
        answer = consumer.prefix(tiny_ids(1, 40), into=into)
        assert (answer.source, answer.cache is into) == ("own", True)
        assert into.report().tokens_kept == [16] * 3


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]
