"""Kullback-Leibler divergence between next-token distributions."""

import math

import torch

from kvfold.ops.divergence import kl_divergence, negative_log_likelihood


def test_equals_torch():
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 3, 5, 257, generator=generator) * 4
    expected = torch.nn.functional.kl_div(
        other.log_softmax(-1), one.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(kl_divergence(one, other), expected)


def test_of_equals_is_zero_and_a_shift_changes_nothing():
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    assert kl_divergence(logits, logits).tolist() == [0.0] * 4
    assert kl_divergence(logits, logits + 7).max() < 1e-5


def test_by_hand():
    one, other = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    expected = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    torch.testing.assert_close(kl_divergence(one, other), torch.tensor([expected]))


def test_is_never_negative_and_is_computed_in_float32():
    logits = torch.randn(200, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = kl_divergence(logits, logits + 1e-2)
    assert found.dtype == torch.float32
    assert (found >= 0).all()


def test_likelihood_of_what_comes():
    logits = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]]).log() + 3
    nats = negative_log_likelihood(logits, torch.tensor([2, 0]))
    assert torch.allclose(nats, torch.tensor([0.5, 0.1]).log().neg())
