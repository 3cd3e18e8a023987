"""What moments say of a part of a layer: its code at every rank and width, and what that costs.

A basis is fitted once; any plan of widths then has a decoder and an expected error in closed form,
with the quantiser's error as noise on the codes that is independent of them:

    D = (C_zz + N)^-1 C_zb,   error = tr C_bb - tr C_bz (C_zz + N)^-1 C_zb
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvfold.ops.ridge import Moments, explained, joint_svd, reduced_rank, ridge
from kvfold.transfer.quantiser import Plan, Quantiser, fit_steps
from kvfold.transfer.translator import Translator, stored

Form = Literal["regression", "joint", "shared"]
"""How a code is found: reduced-rank regression on all kv heads together (ours, which no other
linear code of its size beats on what it was fitted to), or the truncated SVD of both models' rows,
of all heads together or, as in the paper, one for all heads."""


@dataclass(frozen=True, slots=True, eq=False)
class Basis:
    """A nested code of one part of a layer."""

    mean: torch.Tensor
    """Of the producer's rows, `[P]`."""
    offset: torch.Tensor
    """Mean of the consumer's rows, `[Q]`."""
    encoder: torch.Tensor
    """`[P, R]`, strongest first, in the type it is stored in."""
    heads: int
    """Rows of their own that a token's row holds."""
    zz: torch.Tensor
    """Covariance of the codes, `[R, R]` in float64."""
    zy: torch.Tensor
    """Covariance of the codes with the consumer's rows, `[R, Q]`."""
    total: float
    """Error of an empty code: expected square over a token's row, in the metric."""
    gains: torch.Tensor
    """What each channel takes off that error, `[R]`."""
    steps: dict[int, torch.Tensor]
    """By bits, the step of each channel, `[R]`."""
    losses: dict[int, torch.Tensor]
    """By bits, the share of each channel's gain that quantising loses, `[R]`."""
    strength: float
    """Of the ridge."""

    @property
    def rank(self) -> int:
        """Channels that can be sent."""
        return self.encoder.shape[1]

    def error(self, plan: Plan) -> float:
        """Expected squared error of a token's row, in the metric."""
        left, start = self.total, 0
        for bits, count in plan:
            part = slice(start, start + count)
            left -= float((self.gains[part] * (1 - self.losses[bits][part])).sum())
            start += count
        return max(left, 0.0)

    def translator(self, plan: Plan) -> Translator:
        """The code with the widths of a plan, and the decoder that the moments call for.

        Raises:
            ConfigError: When the decoder does not fit the type it is stored in.
        """
        rank = sum(count for _, count in plan)
        noise, steps, start = [], [], 0
        for bits, count in plan:
            part = slice(start, start + count)
            noise.append(self.losses[bits][part].double() * self.zz.diagonal()[part])
            steps.append(self.steps[bits][part])
            start += count
        zz = self.zz[:rank, :rank]
        if noise:
            zz = zz + torch.cat(noise).diag()
        decoder = ridge(zz, self.zy[:rank], self.strength) if rank else self.zy[:0]
        device = self.encoder.device
        chosen = torch.cat(steps) if steps else torch.empty(0, device=device)
        return Translator(
            mean=self.mean,
            encoder=self.encoder[:, :rank],
            quantiser=Quantiser(plan, chosen),
            decoder=stored(decoder, self.encoder.dtype),
            offset=self.offset,
            heads=self.heads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """How a basis is found."""

    widths: Sequence[int]
    """Bits to fit steps for."""
    form: Form = "regression"
    """Of the code."""
    strength: float = 1e-6
    """Of the ridge; see `kvfold.ops.ridge.ridge`."""
    dtype: torch.dtype = torch.float32
    """Of the encoder and decoder as they are stored."""


def fit_basis(
    moments: Moments,
    sample: torch.Tensor,
    how: Fitting,
    *,
    heads: int = 1,
    metric: torch.Tensor | None = None,
) -> Basis:
    """Find a code.

    Args:
        moments: Of rows [producer's | consumer's], `[P + Q]`.
        sample: Some of the producer's rows, `[N, P]`, for the quantiser's steps.
        how: Form and types.
        heads: Kv heads in a row; only the shared form asks.
        metric: What an error of the consumer's row costs, `[Q, Q]`; only the regression asks.
    """
    width, shared = sample.shape[1], heads if how.form == "shared" else 1
    metric = metric if how.form == "regression" else None
    if shared > 1:
        moments, width = moments.pooled(2, heads), width // heads
        sample = sample.reshape(-1, width)
    covariance, mean = moments.covariance, moments.mean.float()
    encoder = _encoder(covariance, width, how, metric)
    wide, yy = encoder.double(), covariance[width:, width:]
    zz = wide.mT @ covariance[:width, :width] @ wide
    zy = wide.mT @ covariance[:width, width:]
    codes = (sample.float() - mean[:width]) @ encoder.float()
    fitted = {bits: fit_steps(codes, bits) for bits in how.widths}
    return Basis(
        mean=mean[:width],
        offset=mean[width:],
        encoder=encoder,
        heads=shared,
        zz=zz,
        zy=zy,
        total=shared * float((yy if metric is None else yy @ metric.double()).trace()),
        gains=shared * explained(zz, zy, metric),
        steps={bits: steps for bits, (steps, _) in fitted.items()},
        losses={bits: losses for bits, (_, losses) in fitted.items()},
        strength=how.strength,
    )


def _encoder(
    covariance: torch.Tensor, width: int, how: Fitting, metric: torch.Tensor | None
) -> torch.Tensor:
    if how.form == "regression":
        encoder = reduced_rank(covariance, width, how.strength, metric)
    else:
        encoder = joint_svd(covariance, width, how.strength)
    # A code may be of any size; of this one, the narrowest type holds every column alike.
    sizes = encoder.norm(dim=0).clamp_min(torch.finfo(encoder.dtype).tiny)
    return (encoder / sizes).to(how.dtype)
