"""Rotary position embeddings (RoPE): turning queries and keys by their position, and back.

With c and s the cosines and sines of the rotated dims, and `turn` the turn of each pair of dims by
90 degrees:

    rotate:    y = x c + turn(x) s
    unrotate:  x = (y c - turn(y) s) / (c^2 + s^2)

A pair is two dims half the rotated width apart, or two neighbours in interleaved models. The
denominator undoes the attention scaling of YaRN and LongRoPE, by which c and s are multiplied.
"""

from __future__ import annotations

import torch


def rotate(
    x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Turns queries or keys by their position.

    Args:
        x: `[B, G, T, D]`.
        cosines: `[B, 1, T, D']` in float32, D' <= D; each pair's twice, where its two dims are.
        sines: Likewise.
        interleaved: Whether pairs are neighbouring dims.

    Returns:
        `[B, G, T, D]`, computed in float32 and returned in `x`'s dtype; dims from D' on are
        unchanged.
    """
    dims = cosines.shape[-1]
    half = dims // 2
    first, second = slice(0, half), slice(half, dims)
    if interleaved:
        first, second = slice(0, dims, 2), slice(1, dims, 2)
    turned = x[..., :dims] * cosines
    turned[..., first].addcmul_(x[..., second], sines[..., first], value=-1)
    turned[..., second].addcmul_(x[..., first], sines[..., second])
    turned = turned.to(x.dtype)
    return turned if dims == x.shape[-1] else torch.cat([turned, x[..., dims:]], dim=-1)


def unrotate(
    x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, interleaved: bool = False
) -> torch.Tensor:
    """Turns rotated queries or keys back; the inverse of `rotate`, with the same arguments.

    Returns:
        `[B, G, T, D]`, computed in float32 and returned in `x`'s dtype; dims from D' on are
        unchanged.
    """
    size = cosines.square() + sines.square()
    return rotate(x, cosines / size, -sines / size, interleaved=interleaved)
