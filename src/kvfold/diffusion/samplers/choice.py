"""Which tokens a distribution offers, and which places are decided first."""

from __future__ import annotations

import torch


def within_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Forbid all but the likeliest tokens that together reach a probability.

    Args:
        logits: `[W, V]`.
        top_p: In (0, 1]; the likeliest token always stays.

    Returns:
        Logits with minus infinity at the others, `[W, V]`.
    """
    ordered = logits.sort(dim=-1, descending=True)
    before = ordered.values.softmax(dim=-1).cumsum(dim=-1) - ordered.values.softmax(dim=-1)
    beyond = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ordered.indices, before > top_p)
    return logits.masked_fill(beyond, -torch.inf)


def within_top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Forbid all tokens less likely than the `top_k`-th, `[W, V]` to `[W, V]`."""
    least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def best(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The places of highest score, of equals the earlier.

    Args:
        scores: `[B, G]`; minus infinity where there is no choice.
        counts: Places wanted of each row, `[B]`.

    Returns:
        Boolean `[B, G]`; rows with too few places to choose from choose all of these.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    within = torch.zeros_like(scores, dtype=torch.bool)
    within = within.scatter(-1, order, ranks < counts[:, None])
    return within & ~scores.isneginf()


def confident(confidence: torch.Tensor, threshold: float) -> torch.Tensor:
    """How many places reach a confidence, `[B, G]` to `[B]`."""
    return (confidence >= threshold).sum(dim=-1)


def supported(confidence: torch.Tensor, factor: float) -> torch.Tensor:
    """The factor rule of Fast-dLLM: the largest n with `(n + 1) (1 - c_n) < factor`.

    Args:
        confidence: `[B, G]`; minus infinity where there is no choice.
        factor: Higher decides more at once.

    Returns:
        n of each row, `[B]`, where c_n is its n-th highest confidence; 0 if there is none.
    """
    ordered = confidence.sort(dim=-1, descending=True).values
    numbers = torch.arange(2, confidence.shape[-1] + 2, device=confidence.device)
    return (numbers * (1 - ordered) < factor).sum(dim=-1)
