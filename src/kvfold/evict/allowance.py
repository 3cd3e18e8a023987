"""A budget as tokens, for rows of several lengths."""

from __future__ import annotations

import torch

from kvfold.budget import MINIMUM_TOKENS, ROUNDING, STEPS, Budget


def row_allowance(budget: Budget, lengths: torch.Tensor, bytes_per_token: int) -> torch.Tensor:
    """Tokens that each row may keep: `Budget.tokens` of each length.

    Args:
        budget: The budget.
        lengths: Tokens that each row has seen, `[B]`.
        bytes_per_token: What one more token of every row costs over all layers.

    Returns:
        One number a row, `[B]`.
    """
    if budget.unit != "ratio":
        return torch.full_like(lengths, budget.tokens(0, bytes_per_token))
    # Not every device has float64; the rows are few.
    exact = lengths.cpu().double() * budget.amount * ROUNDING
    allowed = exact.floor().long().clamp_min(MINIMUM_TOKENS)
    step = 2 ** (torch.log2(allowed.double()).floor().long() + 1 - STEPS).clamp_min(0)
    return (allowed - allowed % step).to(lengths.device)
