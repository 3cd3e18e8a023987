"""A budget as tokens, for rows of one length or of several."""

from __future__ import annotations

import torch

from kvfold.budget import MINIMUM_TOKENS, ROUNDING, Budget


def even_allowance(
    budget: Budget, length: int, bytes_per_token: int, *, growing: bool = False
) -> int:
    """Tokens that every row may keep, when all have seen the same number.

    Args:
        budget: The budget.
        length: Tokens seen.
        bytes_per_token: What one more token of every row costs over all layers.
        growing: Whether tokens come one at a time. A ratio then allows one more every few steps;
            it is rounded down to 16 steps a doubling, so that storage grows rarely and is within
            the budget at every moment.
    """
    allowed = budget.tokens(length, bytes_per_token)
    if not growing or budget.unit != "ratio":
        return allowed
    return allowed - allowed % (1 << max(allowed.bit_length() - 5, 0))


def row_allowance(
    budget: Budget, lengths: torch.Tensor, bytes_per_token: int, *, growing: bool = False
) -> torch.Tensor:
    """Tokens that each row may keep: `even_allowance` of each length, `[B]`."""
    if budget.unit != "ratio":
        return torch.full_like(lengths, budget.tokens(0, bytes_per_token))
    # Not every device has float64; the rows are few.
    exact = lengths.cpu().double() * budget.amount * ROUNDING
    allowed = exact.floor().long().clamp_min(MINIMUM_TOKENS)
    if growing:
        step = 2 ** (torch.log2(allowed.double()).floor().long() - 4).clamp_min(0)
        allowed = allowed - allowed % step
    return allowed.to(lengths.device)
