"""What is replayed into a cache is what it would have heard itself."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.cache import KVCache, prefill
from kvfold.cache.replay import RecordingCache, replay
from kvfold.errors import ConfigError
from tests.contract import assert_close, attached, left_padded, teacher_forced
from tests.tiny import tiny_ids

METHODS = ["full", "streaming", "h2o", "snapkv", "tova", "distill", "sekv"]


def recorded(ids: torch.Tensor, mask: torch.Tensor | None = None) -> RecordingCache:
    source = RecordingCache(attached())
    prefill(attached(), ids, source, attention_mask=mask)
    return source


def fresh(method: str) -> KVCache:
    budget = None if method == "full" else 0.5
    return kvfold.make_cache(attached(), method, budget=budget)


def follow(cache: KVCache, rows: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    return teacher_forced(
        attached(), cache, tiny_ids(rows, 3), tiny_ids(rows, 9, seed=1), mask=mask
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt(method: str):
    ids, told, read = tiny_ids(2, 120), fresh(method), fresh(method)
    replay(recorded(ids), told)
    prefill(attached(), ids, read)
    assert told.report() == read.report()
    assert_close(follow(told, 2), follow(read, 2), 1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_padded_rows(method: str):
    ids, mask = tiny_ids(2, 120), left_padded([120, 80], 120)
    told, read = fresh(method), fresh(method)
    replay(recorded(ids, mask), told)
    prefill(attached(), ids, read, attention_mask=mask)
    assert told.report() == read.report()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [50, 120, 333])
def test_a_prompt_that_is_repeated(method: str, count: int):
    cache = fresh(method)
    source = recorded(tiny_ids(1, 120))
    replay(source, cache, count=count)
    assert cache.get_seq_length() == count
    assert cache.report().bytes_full == source.report().bytes_full // 120 * count
    assert torch.isfinite(follow(cache, 1)).all()


def test_padding_is_not_repeated():
    source = recorded(tiny_ids(2, 50), left_padded([50, 30], 50))
    with pytest.raises(ConfigError, match="padding cannot be repeated"):
        replay(source, fresh("full"), count=100)


def test_repeated_tokens_stand_one_after_the_other():
    source, cache = recorded(tiny_ids(1, 20)), fresh("full")
    replay(source, cache, count=50)
    for mine, own in zip(cache.parts, source.parts, strict=True):
        assert mine.slots.positions[0, 0].tolist() == list(range(50))
        for place in (0, 19, 20, 49):
            assert torch.equal(mine.slots.keys[:, :, place], own.slots.keys[:, :, place % 20])
            assert torch.equal(mine.slots.values[:, :, place], own.slots.values[:, :, place % 20])
