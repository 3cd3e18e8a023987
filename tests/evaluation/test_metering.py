"""What a cache takes by the way, with a clock that is known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch

import kvfold
from kvfold.evaluation import metering, prompt_batch
from kvfold.evaluation.prompt_batch import PromptBatch
from tests.contract import attached
from tests.tiny import tiny_ids

QUESTION = 4


@pytest.fixture(autouse=True)
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every look at the clock is a second after the one before."""
    clock = count()
    for module in (metering, prompt_batch):
        monkeypatch.setattr(module, "seconds_now", lambda device: float(next(clock)))
    yield


@pytest.mark.parametrize(("question", "extra"), [(0, 0), (QUESTION, 1)])
def test_reading_counts_for_each_and_so_does_a_later_question(question: int, extra: int) -> None:
    model, rows = attached(), tiny_ids(2, 40).tolist()
    batch = PromptBatch(model, rows, pad=0, question=question)
    full = batch.decoder()
    told = batch.tell(kvfold.make_cache(model, "h2o", budget=0.5))
    assert full.metered().first_token_seconds == 1 + extra
    assert told.metered().first_token_seconds == 2 + extra
    assert told.metered().rows == 2
    assert told.metered().tokens_per_second is None


def test_a_cache_that_reads_by_itself_is_not_charged_for_the_other() -> None:
    model = attached("gemma2")
    batch = PromptBatch(model, tiny_ids(2, 40).tolist(), pad=0)
    cache = kvfold.make_cache(model, "h2o", budget=0.5)
    assert len(cache.own_layers) < len(cache.layers)
    assert batch.tell(cache).metered().first_token_seconds == 1


def test_decoded_tokens_of_all_rows_count_and_a_copy_counts_by_itself() -> None:
    model, rows = attached(), tiny_ids(3, 40).tolist()
    decoder = PromptBatch(model, rows, pad=0).tell(kvfold.make_cache(model, "tova", budget=0.5))
    copy = decoder.fork()
    for tokens in tiny_ids(3, 5, seed=1).T:
        decoder.feed(tokens)
    assert decoder.metered().tokens_per_second == 3
    assert decoder.metered().first_token_seconds == 2
    copy.feed(torch.tensor([5, 6, 7]))
    assert decoder.metered().tokens_per_second == 3


def test_the_peak_is_what_was_held_after_a_forward_at_most() -> None:
    model, rows = attached(), tiny_ids(2, 40).tolist()
    batch = PromptBatch(model, rows, pad=0)
    full, small = batch.decoder(), batch.tell(kvfold.make_cache(model, "streaming", budget=16))
    before = small.cache.report().bytes_fast
    for tokens in tiny_ids(2, 30, seed=1).T:
        full.feed(tokens)
        small.feed(tokens)
    report = full.cache.report()
    assert full.cache.bytes_held == report.bytes_fast + report.bytes_slow
    assert full.metered().bytes_peak == full.cache.bytes_held // 2 >= report.bytes_full // 2
    assert small.metered().bytes_peak == before // 2
