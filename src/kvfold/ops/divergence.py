"""How far one next-token distribution is from another."""

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
