"""What stands for a token's values when its drift is measured (SPA-Cache, arXiv 2602.02544).

A layer's value projection is `v = W n + b` for the normed input n. With the thin SVD
`W = U S V^T`, the proxy of rank R is `p = S_R V_R^T n + U_R^T b`: the values in their R strongest
directions, at the cost of R instead of G D products a token. At full rank U is orthogonal, so that
the cosine of two proxies is that of the two values exactly. The authors leave the bias out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.diffusion.decoder import Decoder, Layer
from kvfold.errors import ConfigError
from kvfold.ops.lowrank import factorise


@dataclass(frozen=True, slots=True, eq=False)
class Proxy:
    """One layer's projection onto the strongest directions of its values."""

    weight: torch.Tensor
    """`[R, M]`, in the model's dtype."""
    bias: torch.Tensor | None
    """`[R]`, if the values have one."""

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, normed: torch.Tensor) -> torch.Tensor:
        """Proxies `[B, K, R]` of normed inputs `[B, K, M]`."""
        return torch.nn.functional.linear(normed, self.weight, self.bias)


def proxies_of(decoder: Decoder, rank: int) -> list[Proxy]:
    """One proxy a layer.

    Args:
        decoder: With weights.
        rank: R, at most the width of values.

    Raises:
        ConfigError: The rank is not from 1 to the width of values.
    """
    width = min(decoder.shape.value_width, decoder.shape.hidden)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= width:
        raise ConfigError(f"the rank is {rank!r}: give a whole number from 1 to {width}")
    return [_proxy(layer, rank) for layer in decoder.blocks]


def _proxy(layer: Layer, rank: int) -> Proxy:
    weight, bias = layer.value.weight, layer.value.bias
    read, directions = factorise(weight.detach().mT, rank)
    turned = None if bias is None else (directions @ bias.detach().float()).to(weight.dtype)
    return Proxy(read.mT.contiguous().to(weight.dtype), turned)
