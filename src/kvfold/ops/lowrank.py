"""Best low-rank approximations of many small matrices at once (truncated SVD).

Computed from the eigenvectors of the smaller Gram matrix (`X X^T` or `X^T X`), which takes a
third to three fifths of the time of `torch.linalg.svd` on a CPU. In float32, singular directions
below about a thousandth of the strongest mix with weaker ones; full rank is exact regardless.
"""

from __future__ import annotations

import torch

from kvfold.errors import ConfigError


def factorise(matrices: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best approximation `left @ right` of each matrix by one of lower rank, in float32.

    Args:
        matrices: `[*, S, D]`, of any floating type; float64 is computed in float64.
        rank: Largest rank wanted, at least 1.

    Returns:
        `left` `[*, S, R]`, the left singular vectors times their singular values, strongest first,
        and `right` `[*, R, D]`, the right singular vectors, with R = min(rank, S, D). The singular
        values are the norms of `left`'s columns; rows of zeros stay zero in `left`.

    Raises:
        ConfigError: The rank is below 1, or a matrix holds NaN or infinity.
    """
    if rank < 1:
        raise ConfigError(f"a rank of {rank} leaves nothing of a matrix: give at least 1")
    wide = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    row_sizes = wide.abs().amax(dim=-1, keepdim=True)
    size = row_sizes.amax(dim=-2, keepdim=True)
    if not bool(size.isfinite().all()):
        raise ConfigError("a matrix to factorise holds NaN or infinity: mask such tokens first")
    # Scaled to 1, no square in the Gram matrix overflows, and the largest does not underflow.
    tiny = torch.finfo(wide.dtype).tiny
    scaled = wide / size.clamp_min(tiny)
    if wide.shape[-2] > wide.shape[-1]:
        right = _strongest(scaled.mT @ scaled, rank)
        return scaled @ right.mT * size, right
    directions = _strongest(scaled @ scaled.mT, rank)
    projected = directions @ scaled
    strengths = projected.norm(dim=-1, keepdim=True)
    left = (directions * (strengths * size)).mT.masked_fill(row_sizes == 0, 0.0)
    return left.contiguous(), projected / strengths.clamp_min(tiny)


def _strongest(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """Eigenvectors `[*, R, S]` of the largest eigenvalues of `[*, S, S]`, largest first."""
    return torch.linalg.eigh(gram).eigenvectors.mT[..., -rank:, :].flip(-2)
