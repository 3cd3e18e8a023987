"""REUSE: a producer's states as codes, and codes as a consumer's states.

    Z = (A - mean) E,  quantised;  B ~ offset + Z D        (SCD, arXiv 2606.07684)

The encoder E is of shape `[P, R]`, the decoder D `[R, Q]`. The joint form codes the row of all kv
heads of a token; the shared form codes each head's own row with one pair of maps. The paper has
the shared form alone, and no means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kvfold.errors import ConfigError
from kvfold.transfer.quantiser import Quantiser


def stored(decoder: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A decoder in the type that it is stored in.

    Raises:
        ConfigError: When it does not fit.
    """
    found = decoder.to(dtype)
    if not bool(found.isfinite().all()):
        raise ConfigError(
            f"a decoder has numbers beyond {dtype}: store it in float32, or give the ridge more "
            "strength"
        )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Translator:
    """One linear code of one part of a layer."""

    mean: torch.Tensor
    """Of what is coded, `[P]` in float32."""
    encoder: torch.Tensor
    """`[P, R]`."""
    quantiser: Quantiser
    """Of the code."""
    decoder: torch.Tensor
    """`[R, Q]`."""
    offset: torch.Tensor
    """What an empty code stands for, `[Q]` in float32."""
    heads: int = 1
    """Rows of their own that a token's row holds: 1 in the joint form."""

    @property
    def bits(self) -> int:
        """Bits of a token."""
        return self.heads * self.quantiser.bits

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes before they are quantised.

        Args:
            rows: `[N, heads * P]`.

        Returns:
            `[N, R]`, or `[N, heads, R]` in the shared form, in float32.
        """
        own = rows.float().unflatten(-1, (self.heads, -1)) if self.heads > 1 else rows.float()
        return (own - self.mean) @ self.encoder.float()

    def encode(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Packed codes of rows `[N, heads * P]`; see `Quantiser.pack`."""
        return self.quantiser.pack(self.codes(rows))

    def received(self, packed: Mapping[str, torch.Tensor], count: int) -> torch.Tensor:
        """Codes of `count` tokens as the consumer has them, `[N, R]` or `[N, heads, R]`."""
        leading = (count,) if self.heads == 1 else (count, self.heads)
        return self.quantiser.unpack(packed, torch.Size(leading))

    def decode(self, packed: Mapping[str, torch.Tensor], count: int) -> torch.Tensor:
        """A consumer's rows `[N, heads * Q]` in float32, of the packed codes of `count` tokens."""
        rows = self.offset + self.received(packed, count) @ self.decoder.float()
        return rows.flatten(1)

    def layout(self, count: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each packed tensor of `count` tokens, by name."""
        leading = (count,) if self.heads == 1 else (count, self.heads)
        parts = self.quantiser.layout().items()
        return {name: (dtype, (*leading, columns)) for name, (dtype, columns) in parts}

    def to(self, device: torch.device) -> Translator:
        """The same with its tensors on a device."""
        return replace(
            self,
            mean=self.mean.to(device),
            encoder=self.encoder.to(device),
            quantiser=replace(self.quantiser, steps=self.quantiser.steps.to(device)),
            decoder=self.decoder.to(device),
            offset=self.offset.to(device),
        )
