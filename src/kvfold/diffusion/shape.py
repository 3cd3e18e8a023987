"""What a masked diffusion model is: the sizes of its decoder, and the habits of its predictions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from kvfold.diffusion.options import as_number, is_whole
from kvfold.errors import UnsupportedModelError

Prediction = Literal["same", "shifted"]
"""Where the token at place i is predicted: at i itself, or at i - 1."""
Topology = Literal["bidirectional", "block_causal"]
"""What a token sees: everything, or its own block of places and those before."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
"""Functions that the gate of an MLP may have."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and flags of a decoder with RoPE, RMS norms and a gated MLP."""

    vocabulary: int
    """V, rows of the embedding."""
    hidden: int
    """M."""
    layers: int
    """L."""
    query_heads: int
    """H."""
    kv_heads: int
    """G, a divisor of H; equal to it without sharing."""
    head_dim: int
    """D, even."""
    mlp: int
    """Width inside an MLP."""
    positions: int
    """Longest sequence."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in a norm."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether the attention's output has one."""
    mlp_bias: bool = False
    """Whether the three matrices of an MLP have one."""
    query_key_norm: bool = False
    """Whether queries and keys are normalised, each head by itself."""
    tied_head: bool = False
    """Whether the head is the embedding."""
    activation: str = "silu"
    """One of `ACTIVATIONS`."""

    def __post_init__(self) -> None:
        """Check that the sizes fit together.

        Raises:
            UnsupportedModelError: Naming the size that does not.
        """
        for field in fields(self)[:8]:
            value = getattr(self, field.name)
            if not is_whole(value):
                raise UnsupportedModelError(
                    f"the decoder's {field.name} is {value!r}: its configuration must give a whole "
                    "number of at least 1"
                )
        for name in ("rope_theta", "norm_epsilon"):
            if not as_number(getattr(self, name)) > 0:
                raise UnsupportedModelError(
                    f"the decoder's {name} is {getattr(self, name)!r}: its configuration must give "
                    "a number above 0"
                )
        if self.query_heads % self.kv_heads or self.head_dim % 2:
            raise UnsupportedModelError(
                f"{self.query_heads} query heads over {self.kv_heads} kv heads of {self.head_dim} "
                "dims: the first must be a multiple of the second, and the dims even"
            )
        if self.activation not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"the activation {self.activation!r} is none of {', '.join(ACTIVATIONS)}"
            )

    @property
    def value_width(self) -> int:
        """Numbers in a token's values, G D."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Traits:
    """What a sampler must know of a masked diffusion model."""

    mask_id: int
    """Token that stands for an undecided one."""
    prediction: Prediction
    """Where a token is predicted."""
    topology: Topology = "bidirectional"
    """What a token sees."""
    block_length: int | None = None
    """Places in a block of the topology `block_causal`."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a text."""
    pad_id: int | None = None
    """Token that fills, and is never meant; it may be one that ends a text."""
    sampler: str = "llada"
    """Name of the sampler that its authors use."""

    @property
    def shift(self) -> int:
        """Places from the one that predicts a token to the token's own: 0 or 1."""
        return int(self.prediction == "shifted")

    @property
    def never(self) -> list[int]:
        """Tokens that must not be emitted: the mask, and a pad that does not end a text."""
        forbidden: Iterable[int | None] = {self.mask_id, self.pad_id} - self.eos_ids
        return sorted(token for token in {*forbidden, self.mask_id} if token is not None)
