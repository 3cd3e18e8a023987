"""What the attention of the last queries says about each token, without the whole matrix."""

from __future__ import annotations

import torch


def pool_in_time(
    scores: torch.Tensor, positions: torch.Tensor, kernel: int, *, in_order: bool = False
) -> torch.Tensor:
    """Raise each score to the highest of its neighbours in time, wherever they are stored.

    Args:
        scores: One a slot and not negative, `[B, G, T]`; zero where the slot is empty.
        positions: Logical positions, `[B, P, T]` with P = G or 1.
        kernel: Odd number of neighbouring tokens, the token itself included.
        in_order: Whether the slots are known to stand in the order of their positions, with no
            empty ones between them.

    Returns:
        `[B, G, T]`, in the slots' own order.
    """
    if in_order:
        return torch.nn.functional.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)
    by_age = positions.argsort(dim=-1, stable=True).expand_as(scores)
    ordered = scores.gather(-1, by_age)
    pooled = torch.nn.functional.max_pool1d(ordered, kernel, stride=1, padding=kernel // 2)
    return torch.empty_like(scores).scatter_(-1, by_age, pooled)
