"""Linear maps from what rows that stream by have in common: moments, ridge, joint codes.

Rows `x` [W] are never held: their count, sum and Gram matrix say all that a linear fit needs. With
`C` the covariance of the rows, and `C_xy` its block of the columns x and y:

    ridge          W = (C_xx + s mean(diag C_xx) I)^-1 C_xy
    joint SVD      Z = [A | B] V_r, V_r the strongest eigenvectors of the covariance of [A | B];
                   E = ridge(A -> Z)                                      (SCD, arXiv 2606.07684)
    reduced rank   E = W U_r, W = ridge(A -> B), U_r the strongest eigenvectors of the covariance
                   of what W predicts: no linear code of rank r says more of B    (not in the paper)

Both encoders are nested: the first r columns are the encoder of rank r. All of it in float64.
"""

from __future__ import annotations

import torch

from kvfold.errors import ConfigError


class Moments:
    """Count, sum and Gram matrix of the rows that were added."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        """Start with no row.

        Args:
            width: W.
            device: Where the sums stand.
        """
        self.count = 0
        self.total = torch.zeros(width, dtype=torch.float64, device=device)
        self.gram = torch.zeros(width, width, dtype=torch.float64, device=device)

    def add(self, rows: torch.Tensor) -> None:
        """Add rows, `[N, W]`.

        Raises:
            ConfigError: When they are not finite numbers, or of another width.
        """
        if rows.ndim != 2 or rows.shape[1] != len(self.total):
            raise ConfigError(
                f"rows {list(rows.shape)} were given to moments of width {len(self.total)}: give "
                "[N, W]"
            )
        wide = rows.to(self.gram)
        if not bool(wide.isfinite().all()):
            raise ConfigError("NaN and infinity have no moments: leave such rows out")
        self.count += len(wide)
        self.total += wide.sum(0)
        self.gram.addmm_(wide.mT, wide)

    @property
    def mean(self) -> torch.Tensor:
        """Mean row, `[W]`."""
        return self.total / max(1, self.count)

    @property
    def covariance(self) -> torch.Tensor:
        """Mean product of the columns' deviations from their means, `[W, W]`."""
        mean = self.mean
        found = self.gram / max(1, self.count) - mean[:, None] * mean
        return (found + found.mT) / 2

    def pooled(self, parts: int, heads: int) -> Moments:
        """Moments of the heads' own rows, every head of a row for itself.

        Args:
            parts: Equal parts of a row, each of all heads, such as 2 for [A | B].
            heads: Heads in a part.

        Returns:
            Moments of width W / heads over `heads` times as many rows.
        """
        width = len(self.total) // (parts * heads)
        pooled = Moments(parts * width, self.gram.device)
        pooled.count = self.count * heads
        pooled.total = self.total.view(parts, heads, width).sum(1).flatten()
        blocks = self.gram.view(parts, heads, width, parts, heads, width)
        own = blocks.diagonal(dim1=1, dim2=4).sum(-1)
        pooled.gram = own.reshape(parts * width, parts * width)
        return pooled


def ridge(xx: torch.Tensor, xy: torch.Tensor, strength: float) -> torch.Tensor:
    """Weights of the linear map from x to y with the least squared error and a price on size.

    Args:
        xx: Covariance of x, `[P, P]`.
        xy: Covariance of x with y, `[P, Q]`.
        strength: Price, as a share of the mean variance of x's columns. At 0, directions that x
            does not have get no weight.

    Returns:
        `[P, Q]`, float64.
    """
    xx, xy = xx.double(), xy.double()
    if not len(xx):
        return xy
    priced = xx + strength * xx.diagonal().mean() * torch.eye(len(xx), dtype=xx.dtype).to(xx)
    factor, info = torch.linalg.cholesky_ex(priced)
    size = factor.diagonal()
    if int(info) == 0 and bool(size.min() > 1e-7 * size.max()):
        return torch.cholesky_solve(xy, factor)
    return torch.linalg.pinv(priced, hermitian=True, rtol=1e-13) @ xy


def joint_svd(covariance: torch.Tensor, width: int, strength: float) -> torch.Tensor:
    """Encoder of the code that A and B share.

    Args:
        covariance: Of rows [A | B], `[P + Q, P + Q]`.
        width: P, the columns of A.
        strength: See `ridge`.

    Returns:
        `[P, P]`: codes of A, strongest first.
    """
    vectors = torch.linalg.eigh(covariance.double()).eigenvectors.flip(-1)[:, :width]
    return ridge(covariance[:width, :width], covariance[:width] @ vectors, strength)


def reduced_rank(
    covariance: torch.Tensor, width: int, strength: float, metric: torch.Tensor | None = None
) -> torch.Tensor:
    """Encoder of the codes of A that say most of B.

    Args:
        covariance: Of rows [A | B], `[P + Q, P + Q]`.
        width: P, the columns of A.
        strength: See `ridge`.
        metric: What an error of B costs, `e metric e^T`, symmetric and positive, `[Q, Q]`; the
            squared error without it.

    Returns:
        `[P, min(P, Q)]`: uncorrelated codes (without a price), strongest first.
    """
    xy = covariance[:width, width:].double()
    if metric is not None:
        xy = xy @ square_root(metric)
    weights = ridge(covariance[:width, :width], xy, strength)
    predicted = weights.mT @ covariance[:width, :width].double() @ weights
    vectors = torch.linalg.eigh((predicted + predicted.mT) / 2).eigenvectors.flip(-1)
    return weights @ vectors[:, :width]


def square_root(metric: torch.Tensor) -> torch.Tensor:
    """The symmetric square root of a positive matrix `[Q, Q]`, in float64.

    Eigenvalues below a millionth of the largest are raised to it, so that it has an inverse.
    """
    values, vectors = torch.linalg.eigh(metric.double())
    raised = values.clamp_min(max(float(values.max()) * 1e-6, 1e-30))
    return vectors * raised.sqrt() @ vectors.mT


def explained(
    zz: torch.Tensor, zy: torch.Tensor, metric: torch.Tensor | None = None
) -> torch.Tensor:
    """What each column of a code adds to the best linear prediction of y.

    Args:
        zz: Covariance of the code, `[R, R]`.
        zy: Covariance of the code with y, `[R, Q]`.
        metric: What an error of y costs, `[Q, Q]`; the squared error without it.

    Returns:
        The mean squared error that falls away as columns are added in order, `[R]`; columns that
        the earlier ones determine add 0.
    """
    zz, zy = zz.double(), zy.double()
    if metric is not None:
        zy = zy @ square_root(metric)
    sizes = zz.diagonal().clamp_min(torch.finfo(zz.dtype).tiny).sqrt()
    scaled = zz / sizes[:, None] / sizes + 1e-12 * torch.eye(len(zz), dtype=zz.dtype).to(zz)
    factor = torch.linalg.cholesky_ex(scaled).L
    solved = torch.linalg.solve_triangular(factor, zy / sizes[:, None], upper=False)
    added = solved.square().sum(-1)
    return added.where(factor.diagonal() > 1e-5, 0.0).nan_to_num(0.0)
