"""Continuations scored through a cache, in batches, against one row at a time."""

from __future__ import annotations

import itertools

import pytest
import torch

import kvfold
from kvfold.errors import ConfigError
from kvfold.evaluation.continuations import Continuation, Likelihood, batches, score
from tests.contract import BASIC, attached, teacher_forced
from tests.tiny import tiny_ids

LIKELIEST = 5
"""Place of the request whose continuation is what the model itself finds likeliest."""


def requests() -> list[Continuation]:
    """Several continuations of one context, and others of other lengths."""
    first, second, third = (tuple(row) for row in tiny_ids(3, 60).tolist())
    tails = [tuple(row) for row in tiny_ids(5, 20, seed=1).tolist()]
    return [
        Continuation(second[:1], tails[0]),
        Continuation(first, tails[1][:1]),
        Continuation(third[:37], tails[2][:9]),
        Continuation(first, tails[3][:14]),
        Continuation(first, tails[4][:6]),
        Continuation(third[:37], greedy(third[:37], 4)),
    ]


def greedy(context: tuple[int, ...], count: int) -> tuple[int, ...]:
    row = list(context)
    for _ in range(count):
        row.append(int(attached()(torch.tensor([row])).logits[0, -1].argmax()))
    return tuple(row[len(context) :])


def alone(request: Continuation, method: str, budget: float | None) -> tuple[float, bool]:
    """The request scored by itself, from the logits of a forced run."""
    context, tokens = torch.tensor([request.context]), torch.tensor([request.tokens])
    cache = kvfold.make_cache(attached(), method, budget=budget)
    logits = teacher_forced(attached(), cache, context, tokens[:, :-1])[0]
    logs = logits.log_softmax(dim=-1)
    total = sum(float(logs[place, token]) for place, token in enumerate(request.tokens))
    return total, logits.argmax(dim=-1).tolist() == list(request.tokens)


def together(method: str, budget: float | None, wanted: list[Continuation]) -> list[Likelihood]:
    return score(attached(), kvfold.make_cache(attached(), method, budget=budget), wanted)


def assert_same(found: list[Likelihood], expected: list[tuple[float, bool]]) -> None:
    assert [one.is_greedy for one in found] == [is_greedy for _, is_greedy in expected]
    totals = [total for total, _ in expected]
    assert [one.log_probability for one in found] == pytest.approx(totals, rel=1e-4)


@pytest.mark.parametrize("method", [*(name for name, _ in BASIC), "sekv"])
def test_a_batch_scores_what_each_request_scores_alone(method: str) -> None:
    expected = [alone(request, method, 0.5) for request in requests()]
    assert_same(together(method, 0.5, requests()), expected)
    back = together(method, 0.5, requests()[::-1])
    assert_same(back, expected[::-1])


def test_the_full_cache_scores_what_one_forward_does() -> None:
    expected = []
    for request in requests():
        ids = torch.tensor([[*request.context, *request.tokens]])
        with torch.no_grad():
            logits = attached()(ids).logits[0, len(request.context) - 1 : -1]
        told = logits.log_softmax(dim=-1)[range(len(request.tokens)), list(request.tokens)]
        expected.append((float(told.sum()), logits.argmax(dim=-1).tolist() == list(request.tokens)))
    assert expected[LIKELIEST][1]
    assert not expected[0][1]
    assert_same(together("full", None, requests()), expected)
    assert_same(together("snapkv", 1.0, requests()), expected)


def test_what_is_evicted_changes_the_score() -> None:
    whole, half = together("full", None, requests()), together("streaming", 0.25, requests())
    assert abs(whole[3].log_probability - half[3].log_probability) > 1e-3


def test_the_cache_keeps_to_its_budget_while_it_scores() -> None:
    cache = kvfold.make_cache(attached(), "tova", budget=16)
    score(attached(), cache, requests())
    report = cache.report()
    assert report.tokens_seen == 60 + 20 - 1
    assert max(report.tokens_kept) <= 16


def test_probabilities_are_taken_in_the_dtype_asked_for() -> None:
    cache = kvfold.make_cache(attached())
    [rough] = score(attached(), cache, requests()[1:2], dtype=torch.bfloat16)
    [exact] = together("full", None, requests()[1:2])
    assert rough.log_probability == float(torch.tensor(rough.log_probability).bfloat16())
    assert rough.log_probability == pytest.approx(exact.log_probability, rel=1e-2)


def test_batches_hold_every_request_once_and_the_same_contexts_together() -> None:
    wanted = requests() * 2
    found = list(batches(wanted, 4, 1000))
    assert sorted(itertools.chain(*found)) == list(range(len(wanted)))
    assert [len(batch) for batch in found] == [4, 4, 4]
    contexts = [wanted[place].context for place in itertools.chain(*found)]
    assert [key for key, _ in itertools.groupby(contexts)] == list(dict.fromkeys(contexts))
    lengths = list(map(len, contexts))
    assert lengths == sorted(lengths, reverse=True)


def test_batches_are_no_wider_than_asked_for() -> None:
    wanted = requests()
    assert len(list(batches(wanted, 100, 79))) == 1
    found = list(batches(wanted, 100, 73))
    assert sorted(itertools.chain(*found)) == list(range(len(wanted)))
    assert len(found) == 2
    for batch in found:
        context = max(len(wanted[place].context) for place in batch)
        assert context + max(len(wanted[place].tokens) for place in batch) - 1 <= 73


def test_no_requests_are_no_batches() -> None:
    assert list(batches([], 4, 10)) == []


def test_more_tokens_than_positions_are_refused() -> None:
    context = tuple(tiny_ids(1, 2040)[0].tolist())
    wanted = [Continuation(context, context[:10])]
    with pytest.raises(ConfigError, match="2049 tokens are more than the model's 2048 positions"):
        together("streaming", 64, wanted)
