"""How far one next-token distribution is from another, and from the token that comes."""

from __future__ import annotations

import torch


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`KL(reference || other)` in nats, computed in float32.

    Args:
        reference: Logits of the distribution to be matched, `[..., V]`.
        other: Logits of the other, `[..., V]`.

    Returns:
        One number a distribution, `[...]`.
    """
    expected = reference.float().log_softmax(dim=-1)
    other = other.float().log_softmax(dim=-1)
    return (expected.exp() * (expected - other)).sum(dim=-1).clamp_min(0)


def negative_log_likelihood(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`-log p(token)` in nats, computed in float32.

    Args:
        logits: Of the distributions, `[..., V]`.
        tokens: What comes, `[...]`.

    Returns:
        One number a token, `[...]`.
    """
    return -logits.float().log_softmax(dim=-1).gather(-1, tokens[..., None]).squeeze(-1)
