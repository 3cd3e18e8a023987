"""Attention over grouped heads, against one softmax a query in float64."""

import pytest
import torch

from kvfold.attention import Scoring, grouped
from kvfold.attention.grouped import (
    attention_probabilities,
    blockwise_attention,
    causal_attention,
    weigh_values,
)
from kvfold.attention.reference import attention

SHAPES = [(1, 1, 1, 1, 1, 1), (2, 4, 2, 5, 11, 16), (1, 9, 3, 7, 13, 8), (3, 6, 1, 1, 17, 5)]
"""B, H, G, Q, T, D."""
TOLERANCES = [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key, value and a mask of the causal kind with holes."""
    rows, heads, groups, queries, total, width = shape
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, heads, queries, width, generator=generator)
    key, value = torch.randn(2, rows, groups, total, width, generator=generator)
    visible = torch.rand(rows, groups, queries, total, generator=generator) < 0.7
    visible &= torch.ones(queries, total, dtype=torch.bool).tril(total - queries)
    visible |= torch.eye(queries, total, dtype=torch.bool).roll(total - queries, dims=-1)
    return query.to(dtype), key.to(dtype), value.to(dtype), visible


def assert_rms(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Finite, and a small root mean square error beside the expected size."""
    assert torch.isfinite(actual).all()
    assert actual.shape == expected.shape
    error = (actual.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error <= tolerance, f"relative RMS {error:.2e}"


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_explicit(
    shape: tuple[int, ...], softcap: float | None, dtype: torch.dtype, tolerance: float
):
    query, key, value, visible = inputs(shape, dtype)
    scoring = Scoring(0.3, softcap=softcap)
    output, weights = attention(query, key, value, visible, 0.3, softcap)
    probabilities = attention_probabilities(query, key, scoring, visible=visible)
    assert probabilities.dtype == torch.float32
    assert_rms(probabilities.flatten(1, 2), weights, tolerance)
    assert_rms(weigh_values(probabilities, value), output, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES, ids=str)
@pytest.mark.parametrize("block", [1, 2, 3, 512])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blockwise(
    shape: tuple[int, ...],
    softcap: float | None,
    block: int,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(grouped, "QUERY_BLOCK", block)
    query, key, value, visible = inputs(shape, dtype)
    output, _ = attention(query, key, value, visible, 0.3, softcap)
    scoring = Scoring(0.3, softcap=softcap)
    for causal in (True, False):
        actual = blockwise_attention(
            query, key, value, scoring, lambda a, b: visible[:, :, a:b], causal=causal
        )
        assert actual.dtype == dtype
        assert_rms(actual, output, tolerance)


def test_blockwise_with_a_rule_that_sees_newer_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grouped, "QUERY_BLOCK", 2)
    query, key, value, visible = inputs((2, 4, 2, 5, 11, 16))
    both = torch.ones_like(visible)
    output, _ = attention(query, key, value, both, 0.3)
    rule = Scoring(0.3)
    actual = blockwise_attention(
        query, key, value, rule, lambda a, b: both[:, :, a:b], causal=False
    )
    assert_rms(actual, output, 1e-5)


def test_one_mask_for_all_rows_and_heads():
    query, key, value, visible = inputs((2, 4, 2, 5, 11, 16))
    one = visible[:1, :1]
    output, _ = attention(query, key, value, one.expand(2, 2, 5, 11), 0.3)
    actual = blockwise_attention(
        query, key, value, Scoring(0.3), lambda a, b: one[:, :, a:b], causal=True
    )
    assert_rms(actual, output, 1e-5)
    probabilities = attention_probabilities(query, key, Scoring(0.3), visible=one)
    assert_rms(weigh_values(probabilities, value), output, 1e-5)


def test_without_a_mask_every_key_is_seen():
    query, key, value, visible = inputs((2, 4, 2, 1, 11, 16))
    output, _ = attention(query, key, value, torch.ones_like(visible), 0.3)
    probabilities = attention_probabilities(query, key, Scoring(0.3))
    assert_rms(weigh_values(probabilities, value), output, 1e-5)


@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (4, 4)], ids=str)
def test_causal(heads: tuple[int, int]):
    query, key, value, visible = inputs((2, *heads, 13, 13, 16))
    causal = torch.ones_like(visible).tril()
    output, _ = attention(query, key, value, causal, 0.3)
    assert_rms(causal_attention(query, key, value, scaling=0.3), output, 1e-5)


@pytest.mark.parametrize("block", [2, 512])
def test_sinks_take_weight_as_one_more_key_without_value(
    block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grouped, "QUERY_BLOCK", block)
    query, key, value, visible = inputs((2, 4, 2, 5, 11, 16))
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(3))
    keys, values = (t.repeat_interleave(2, 1).double() for t in (key, value))
    scores = query.double() @ keys.transpose(-1, -2) * 0.3
    scores = scores.masked_fill(~visible.repeat_interleave(2, 1), -torch.inf)
    extra = sinks.double().view(1, 4, 1, 1).expand(2, 4, 5, 1)
    weights = torch.cat([scores, extra], dim=-1).softmax(-1)[..., :-1]
    scoring = Scoring(0.3, sinks=sinks)
    probabilities = attention_probabilities(query, key, scoring, visible=visible)
    assert_rms(probabilities.flatten(1, 2), weights, 1e-5)
    assert (probabilities.sum(-1) < 1).all()
    actual = blockwise_attention(
        query, key, value, scoring, lambda start, end: visible[:, :, start:end], causal=True
    )
    assert_rms(actual, weights @ values, 1e-5)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_causal_probabilities_equal_those_of_the_mask(softcap: float | None):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=generator)
    key = torch.randn(2, 2, 11, 8, generator=generator)
    scoring = Scoring(0.3, softcap=softcap)
    visible = torch.ones(5, 11, dtype=torch.bool).tril(6)[None, None]
    expected = attention_probabilities(query, key, scoring, visible=visible)
    actual = attention_probabilities(query, key, scoring, causal=True)
    assert torch.equal(actual, expected)
    assert actual[:, :, :, 0, -4:].abs().max() == 0
