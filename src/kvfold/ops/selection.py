"""Which tokens a budget keeps, and which one goes next."""

from __future__ import annotations

import torch

EMPTY = -1
"""Position of a slot that holds no token."""


def protected(
    positions: torch.Tensor,
    lengths: int | torch.Tensor,
    budgets: int | torch.Tensor,
    *,
    sinks: int,
    recent: int,
) -> torch.Tensor:
    """The tokens that no policy may evict: the first `sinks` and the last `recent`.

    Both shrink under a small budget, so that at least a quarter of it is left to the policy.

    Args:
        positions: Logical position of each held token, `[B, P, T]`; `EMPTY` where there is none.
        lengths: Tokens seen, one number or one a row `[B]`.
        budgets: Tokens that may be kept, one number or one a row `[B]`.
        sinks: First tokens wanted.
        recent: Last tokens wanted.

    Returns:
        Boolean mask `[B, P, T]`, true for empty slots too.
    """
    first = _at_most(budgets // 4, sinks)
    last = lengths - _at_most(budgets // 2, recent)
    return (positions < _by_row(first)) | (positions >= _by_row(last))


def _at_most(value: int | torch.Tensor, limit: int) -> int | torch.Tensor:
    return value.clamp(max=limit) if isinstance(value, torch.Tensor) else min(value, limit)


def _by_row(value: int | torch.Tensor) -> int | torch.Tensor:
    return value.view(-1, 1, 1) if isinstance(value, torch.Tensor) else value


def keep_indices(
    scores: torch.Tensor,
    positions: torch.Tensor,
    shielded: torch.Tensor,
    budgets: int | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best tokens within the budget, in order of their position; of equals the newer.

    Args:
        scores: Higher is kept, `[B, P, T]`.
        positions: Logical positions, `[B, P, T]`; `EMPTY` slots are never kept.
        shielded: Tokens kept whatever their score, `[B, P, T]`.
        budgets: Tokens to keep, one number or one a row `[B]`.

    Returns:
        Slot indices `[B, P, K]`, K the largest budget or T, and a mask `[B, P, K]` that is false
        past the end of a row that keeps fewer.
    """
    total = scores.shape[-1]
    most = int(budgets.max()) if isinstance(budgets, torch.Tensor) else budgets
    count = min(most, total)
    held = positions >= 0
    scores = scores.masked_fill(shielded, torch.inf).masked_fill(~held, -torch.inf)
    by_age = positions.argsort(dim=-1, stable=True)
    worst_first = scores.gather(-1, by_age).argsort(dim=-1, stable=True)
    best = worst_first[..., total - count :]
    rank = torch.arange(count - 1, -1, -1, device=scores.device)
    kept = (rank < _by_row(budgets)) & held.gather(-1, by_age).gather(-1, best)
    ages = torch.where(kept, best, total).sort(dim=-1).values
    return by_age.gather(-1, ages.clamp(max=total - 1)), ages < total


def victim(
    scores: torch.Tensor,
    positions: torch.Tensor,
    shielded: torch.Tensor,
    room: torch.Tensor | None = None,
) -> torch.Tensor:
    """The slot that the next token takes.

    Args:
        scores: Higher is kept, `[B, P, T]`.
        positions: Logical positions, `[B, P, T]`.
        shielded: Tokens that may not go, `[B, P, T]`.
        room: Rows that may still fill an empty slot `[B]`; without it every slot is held.

    Returns:
        Slot indices `[B, P, 1]`: the first empty slot where there is room, else the first of the
        tokens of lowest score (an even row and the same row in a batch are stored alike, so both
        choose the same).
    """
    scores = torch.where(shielded, torch.inf, scores)
    if room is not None:
        empty = torch.where(room, -torch.inf, torch.inf).to(scores.dtype).view(-1, 1, 1)
        scores = torch.where(positions >= 0, scores, empty)
    return scores.argmin(dim=-1, keepdim=True)


def turns_to_go(
    scores: torch.Tensor, shielded: torch.Tensor, count: int | torch.Tensor
) -> torch.Tensor:
    """Number the slots that the next tokens take.

    Args:
        scores: Higher is kept, `[B, P, T]`.
        shielded: Slots that are empty or may not go, `[B, P, T]`.
        count: How many to number, if there are so many; one number a row `[B]` where they differ.

    Returns:
        `-count` for the slot that goes first, and up to -1 for the last; 0 for all others,
        `[B, P, T]`.
    """
    counts = torch.as_tensor(count, device=scores.device).clamp_max(scores.shape[-1]).view(-1, 1, 1)
    most = int(counts.max())
    # What a policy's weights overflow to is still a score.
    scores = scores.nan_to_num(0.0)
    lowest = scores.masked_fill(shielded, torch.inf).topk(most, dim=-1, largest=False)
    turns = (torch.arange(most, device=scores.device) - counts).clamp_max(0).to(scores.dtype)
    turns = torch.where(lowest.values.isposinf(), 0, turns)
    return torch.zeros_like(scores).scatter_(-1, lowest.indices, turns)
