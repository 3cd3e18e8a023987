"""A routing sketch: a few bytes a token that rank spans nearly as the true keys do.

Not in the paper (SeKV, arXiv 2606.31145), whose summaries are projected means. The keys of a layer
and kv head are written in the context's own principal directions, the first few of them in 4 bits
each. A query's scores are then estimated token by token, so that a span is known by its estimated
attention mass and not by a mean in which one important token drowns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.ops.quantize import (
    pack_nibbles,
    packed_coefficients,
    packed_scores,
    quantise,
    scales_of,
)

BITS = 4
_LEAST_STEP = 1e-6
"""Of a code, in score units of queries whose mean square is 1 in each dim."""


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """The directions of one layer; codes are kept by its owner."""

    look: torch.Tensor
    """From a query to what it gives packed codes, and to what it gives all keys alike,
    `[B, G, D, R + 1]` (R + 2 where R is odd): all that is read at a query."""
    center: torch.Tensor
    """Mean key, `[B, G, 1, D]`; for new spans alone."""
    write: torch.Tensor
    """From a key about the mean to its codes, `[B, G, D, R]` in float32; for new spans alone."""

    @classmethod
    def fit(
        cls, keys: torch.Tensor, tokens: torch.Tensor, moment: torch.Tensor, directions: int
    ) -> Sketch:
        """Find the directions of a context.

        Args:
            keys: `[B, G, N, D]`, rotated.
            tokens: False where a row has no token, `[B, N]`.
            moment: Sum of the outer products of queries with themselves, `[B, G, D, D]`: the error
                of a score is what a query makes of a key's error, so that directions in which
                queries are long matter more.
            directions: R, at most D.
        """
        dtype = keys.dtype
        weights = tokens[:, None, :, None].float()
        keys = keys.float() * weights
        center = keys.sum(2, keepdim=True) / weights.sum(2, keepdim=True).clamp_min(1)
        centered = (keys - center) * weights
        ruler = torch.linalg.cholesky(_regular(moment))
        measured = centered @ ruler
        # Eigenvalues come in ascending order.
        axes = torch.linalg.eigh(measured.transpose(-1, -2) @ measured).eigenvectors
        axes = axes[..., -directions:].flip(-1)
        # Where keys do not differ a step would be nothing, and a later key infinitely many.
        scales = scales_of(measured @ axes, BITS, dim=2).clamp_min(_LEAST_STEP)
        read = torch.linalg.solve_triangular(ruler.transpose(-1, -2), axes, upper=True)
        look = packed_coefficients(read * scales)
        look[..., -1:] += center.transpose(-1, -2)
        return cls(look.to(dtype), center.to(dtype), ruler @ axes / scales)

    def where(self, rows: torch.Tensor, other: Sketch) -> Sketch:
        """This one in some rows, `[B]`, and another in the rest."""
        chosen = rows[:, None, None, None]
        return Sketch(
            self.look.where(chosen, other.look),
            self.center.where(chosen, other.center),
            self.write.where(chosen, other.write),
        )

    def encode(self, keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Codes of keys, two to a byte.

        Args:
            keys: `[B, G, N, D]`, rotated.
            tokens: False where a row has no token, `[B, N]`; there the mean key is encoded, whose
                score stands out above no other.

        Returns:
            `[B, G, R / 2, N]`.
        """
        centered = (keys.float() - self.center.float()) * tokens[:, None, :, None]
        codes = centered @ self.write
        return pack_nibbles(quantise(codes, codes.new_ones(()), BITS)).transpose(-1, -2)

    def scores(self, query: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Estimated products of queries and keys, in float32 and in two parts.

        Args:
            query: `[B, G, Q, D]`, already scaled.
            codes: `[B, G, R / 2, T]`.

        Returns:
            What tokens differ in, `[B, G, Q, T]`, and what all have in common, `[B, G, Q, 1]`.
        """
        seen = query.float() @ self.look.float()
        return packed_scores(seen[..., :-1], codes), seen[..., -1:]

    @property
    def bytes_fast(self) -> int:
        """What a query reads, the codes left out."""
        return self.look.nbytes

    @property
    def bytes_slow(self) -> int:
        """What only new spans need."""
        return self.center.nbytes + self.write.nbytes


def _regular(moment: torch.Tensor) -> torch.Tensor:
    """A moment with no direction that queries are without, so that it can be divided by."""
    mean = moment.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(moment.dtype).tiny)
    identity = torch.eye(moment.shape[-1], device=moment.device)
    return moment / mean[..., None, None] + 1e-3 * identity
