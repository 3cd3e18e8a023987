"""Prompts that one cache reads and others are told of."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.cache import prefill
from kvfold.evaluation.prompt_batch import PromptBatch
from tests.contract import (
    EVICTING,
    assert_close,
    attached,
    held_positions,
    left_padded,
)
from tests.tiny import tiny_ids

LENGTHS = [60, 41, 23]


def prompts() -> tuple[torch.Tensor, list[list[int]]]:
    ids = tiny_ids(3, 60)
    return ids, [row[60 - length :] for row, length in zip(ids.tolist(), LENGTHS, strict=True)]


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_a_cache_that_is_told_equals_one_that_reads(method: str, scope: str) -> None:
    model, (ids, rows) = attached(), prompts()
    batch = PromptBatch(model, rows, pad=0)
    full = batch.decoder()
    told = batch.tell(kvfold.make_cache(model, method, budget=0.5, scope=scope))
    read = kvfold.make_cache(model, method, budget=0.5, scope=scope)
    mask = left_padded(LENGTHS, 60)
    logits = prefill(model, ids, read, attention_mask=mask)
    assert_close(told.logits, logits)
    for step in tiny_ids(3, 12, seed=1).T:
        assert held_positions(told.cache) == held_positions(read)
        mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
        full.feed(step)
        assert_close(told.feed(step), prefill(model, step[:, None], read, attention_mask=mask))
    assert told.cache.report() == read.report()


def test_what_one_cache_does_changes_no_other() -> None:
    model, (_, rows) = attached(), prompts()
    batch = PromptBatch(model, rows, pad=0)
    steps = tiny_ids(3, 8, seed=1).T
    decoders = [
        batch.tell(kvfold.make_cache(model, "h2o", budget=0.5)),
        batch.tell(kvfold.make_cache(model, "full")),
    ]
    first, whole = [[decoder.feed(step) for step in steps] for decoder in decoders]
    again = batch.tell(kvfold.make_cache(model, "h2o", budget=0.5))
    assert all(torch.equal(again.feed(step), then) for step, then in zip(steps, first, strict=True))
    full = batch.decoder()
    assert all(torch.equal(full.feed(step), then) for step, then in zip(steps, whole, strict=True))


@pytest.mark.parametrize("kind", ["gemma2", "mistral_window"])
def test_layers_with_a_window_read_for_themselves(kind: str) -> None:
    model, (ids, rows) = attached(kind), prompts()
    told = PromptBatch(model, rows, pad=0).tell(kvfold.make_cache(model, "tova", budget=0.5))
    read, mask = kvfold.make_cache(model, "tova", budget=0.5), left_padded(LENGTHS, 60)
    prefill(model, ids, read, attention_mask=mask)
    step, mask = tiny_ids(3, 1, seed=1), torch.cat([mask, mask.new_ones(3, 1)], dim=1)
    assert_close(told.feed(step[:, 0]), prefill(model, step, read, attention_mask=mask))


def test_some_rows_go_on_alone() -> None:
    model, (_, rows) = attached(), prompts()
    told = PromptBatch(model, rows, pad=0).tell(kvfold.make_cache(model, "snapkv", budget=0.5))
    some = told.fork()
    some.select([2, 0])
    for step in tiny_ids(3, 8, seed=1).T:
        assert_close(some.feed(step[[2, 0]]), told.feed(step)[[2, 0]])


QUESTION = 7


@pytest.mark.parametrize(("method", "scope"), EVICTING)
def test_a_question_that_comes_later_is_read_through_what_is_kept(method: str, scope: str) -> None:
    model, (ids, rows) = attached(), prompts()
    batch = PromptBatch(model, rows, pad=0, question=QUESTION)
    told = batch.tell(kvfold.make_cache(model, method, budget=0.5, scope=scope))
    read = kvfold.make_cache(model, method, budget=0.5, scope=scope)
    mask, end = left_padded(LENGTHS, 60), 60 - QUESTION
    prefill(model, ids[:, :end], read, attention_mask=mask[:, :end])
    assert_close(told.logits, prefill(model, ids[:, end:], read, attention_mask=mask))
    assert held_positions(told.cache) == held_positions(read)
    for step in tiny_ids(3, 4, seed=1).T:
        mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
        assert_close(told.feed(step), prefill(model, step[:, None], read, attention_mask=mask))


def test_the_full_cache_says_the_same_whenever_it_reads_the_question() -> None:
    model, (_, rows) = attached(), prompts()
    early, late = (
        PromptBatch(model, rows, pad=0, question=count).decoder() for count in (0, QUESTION)
    )
    for step in tiny_ids(3, 4, seed=1).T:
        assert_close(late.logits, early.logits)
        early.feed(step)
        late.feed(step)


@pytest.mark.parametrize("question", [0, QUESTION])
def test_two_resolutions_are_told_what_surprises(question: int) -> None:
    model, ids = attached(), tiny_ids(2, 200)
    batch = PromptBatch(model, ids.tolist(), pad=0, question=question)
    options = {"budget": 0.5, "shortest": 4, "longest": 8, "slow": "exact"}
    told = batch.tell(kvfold.make_cache(model, "sekv", **options))
    read, end = kvfold.make_cache(model, "sekv", **options), 200 - question
    logits = prefill(model, ids[:, :end], read)
    if question:
        logits = prefill(model, ids[:, end:], read)
    assert told.cache.report() == read.report()
    assert told.cache.report().bytes_slow > 0
    assert_close(told.logits, logits)
    for step in tiny_ids(2, 4, seed=1).T:
        assert_close(told.feed(step), prefill(model, step[:, None], read))


def test_layers_with_a_window_read_questions_later_too() -> None:
    model, (ids, rows) = attached("gemma2"), prompts()
    batch = PromptBatch(model, rows, pad=0, question=QUESTION)
    told = batch.tell(kvfold.make_cache(model, "tova", budget=0.5))
    read, mask = kvfold.make_cache(model, "tova", budget=0.5), left_padded(LENGTHS, 60)
    end = 60 - QUESTION
    prefill(model, ids[:, :end], read, attention_mask=mask[:, :end])
    assert_close(told.logits, prefill(model, ids[:, end:], read, attention_mask=mask))
