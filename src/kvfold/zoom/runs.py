"""Runs of different lengths that stand one after the other in one dimension of a tensor."""

from __future__ import annotations

import torch


def starts_of(sizes: torch.Tensor) -> torch.Tensor:
    """Where each of `[B, S]` runs begins that stand one after the other."""
    return sizes.cumsum(1) - sizes


def packed(tensor: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """Entries of `[B, P, X, *]` that are used, by `[B, X]`, one after the other.

    Returns:
        `[B, P, C, *]`, C the most that a row uses; anything where a row uses fewer.
    """
    count = int(used.sum(1).max())
    places = torch.where(used, used.cumsum(1) - 1, count)
    entries = torch.arange(used.shape[1], device=used.device).expand(len(used), -1)
    order = places.new_zeros(len(used), count + 1).scatter_(1, places, entries)[:, :count]
    index = order.view(len(used), 1, count, *[1] * (tensor.ndim - 3))
    return tensor.gather(2, index.expand(-1, tensor.shape[1], -1, *tensor.shape[3:]))


def runs(
    tensor: torch.Tensor, places: torch.Tensor, first: torch.Tensor, count: int
) -> torch.Tensor:
    """Entries of `[B, P, X, *]` from `first` on, at places `[N]` of B times P, `[N, count, *]`."""
    steps = torch.arange(count, device=first.device)
    where = (first[:, None] + steps).clamp_max_(tensor.shape[2] - 1)
    where = where + (places * tensor.shape[2])[:, None]
    found = tensor.flatten(0, 2).index_select(0, where.flatten())
    return found.view(len(first), count, *tensor.shape[3:])
