"""Attention the slow obvious way, to compare the fast ones with."""

from __future__ import annotations

import torch


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax a query, in loops and float64.

    Args:
        query: `[B, H, Q, D]`.
        key: `[B, G, T, D]`.
        value: `[B, G, T, D]`.
        visible: Boolean mask `[B, G, Q, T]`.
        scaling: Factor on the scores.
        softcap: Bound on the scores by `tanh`.

    Returns:
        Output `[B, H, Q, D]` and probabilities `[B, H, Q, T]`.
    """
    batch, heads, queries, _ = query.shape
    groups, total = key.shape[1], key.shape[2]
    output = torch.zeros(batch, heads, queries, value.shape[-1], dtype=torch.float64)
    probabilities = torch.zeros(batch, heads, queries, total, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // groups)
            for q in range(queries):
                scores = key[b, g].double() @ query[b, h, q].double() * scaling
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                scores[~visible[b, g, q]] = -torch.inf
                weights = torch.softmax(scores, dim=0)
                probabilities[b, h, q] = weights
                output[b, h, q] = weights @ value[b, g].double()
    return output, probabilities
