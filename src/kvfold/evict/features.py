"""What a learned policy is told about each token: the five features of DistillCache.

DistillCache (arXiv 2608.08878). Departures: in decode the attention of the last queries is an
exponential window of the same mean length, where the paper keeps the latest query's alone; the
spread is over the heads of a layer, a query at a time; all are means over layers. The window counts
64 queries from the start, so that a shorter prompt's and a young token's mass are smaller by that.
"""

from __future__ import annotations

import torch

FEATURES = ("mass", "norm", "spread", "entropy", "position")
"""In the order of the columns: attention mass received, L2 norm of the value, variance over heads
of the mass, attention-weighted entropy in nats of the queries that attend, position in [0, 1]."""

_TINY = 1e-30


def attention_statistics(probabilities: torch.Tensor, queries: int | torch.Tensor) -> torch.Tensor:
    """What the slots of one layer receive from some queries, averaged over them.

    Args:
        probabilities: `[B, G, H/G, Q, T]` in float32, zero for padding queries.
        queries: How many of the Q queries are tokens, one number or one a row `[B]`.

    Returns:
        The mass averaged over heads, its variance over heads, and the mass weighted by the mean
        entropy of the query it comes from: `[B, 3, T]`.
    """
    by_head = probabilities.flatten(1, 2)
    heads, count = by_head.shape[1:3]
    mass = by_head.sum(1).div_(heads)
    spread = by_head.square().sum(1).div_(heads).addcmul_(mass, mass, value=-1).clamp_min_(0)
    information = by_head.clamp_min(_TINY).log_().mul_(by_head)
    entropy = information.sum((1, 3)).div_(-heads)
    if count == 1:
        return torch.cat([mass, spread, mass * entropy[..., None]], dim=1)
    sums = [mass.sum(1, keepdim=True), spread.sum(1, keepdim=True)]
    together = torch.cat([*sums, torch.bmm(entropy[:, None], mass)], dim=1)
    if isinstance(queries, int):
        return together.div_(max(queries, 1))
    return together.div_(queries.clamp(min=1).view(-1, 1, 1))


def value_norms(values: torch.Tensor) -> torch.Tensor:
    """The L2 norm of each value, averaged over kv heads: `[B, G, N, D]` to `[B, 1, N]`."""
    return torch.linalg.vector_norm(values.float(), dim=-1).mean(1, keepdim=True)


def feature_matrix(
    mass: torch.Tensor,
    norm: torch.Tensor,
    spread: torch.Tensor,
    weighted: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """The five features of every slot.

    Args:
        mass: Mean mass over heads and layers, `[B, 1, T]`.
        norm: Mean norm of the value over kv heads and layers, `[B, 1, T]`.
        spread: Variance of the mass over heads, mean over layers, `[B, 1, T]`.
        weighted: Mass weighted by the entropy of its query, `[B, 1, T]`.
        positions: Logical positions `[B, 1, T]`; negative where a slot is empty.

    Returns:
        `[B, T, 5]`, in the order of `FEATURES`.
    """
    entropy = weighted / mass.clamp_min(_TINY)
    newest = positions.amax(-1, keepdim=True).clamp_min(1)
    columns = (mass, norm, spread, entropy, positions.clamp_min(0) / newest)
    return torch.stack([column[:, 0] for column in columns], dim=-1)
