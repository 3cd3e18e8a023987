"""Our own decoder for masked diffusion: layers whose steps can be taken for chosen tokens alone.

A layer does not decide what is computed. It offers queries, keys and values of the tokens it is
given, and `attended`, which ends a layer for given tokens against keys and values of any tokens.
The dense forward computes all of them; what runs sparsely chooses (see `flow` and `drift`).
"""

from __future__ import annotations

import torch
from torch import nn

from kvfold.diffusion.parts import part
from kvfold.diffusion.shape import DecoderShape
from kvfold.ops.rotary import rotate

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines `[B, T, 1, D]` in float32."""

_ACTIVATIONS = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
}


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
) -> torch.Tensor:
    """Attention in which the query heads of a group are queries of one kv head.

    Args:
        queries: `[B, Q, H, D]`.
        keys: `[B, T, G, D]`.
        values: `[B, T, G, D]`.
        visible: Boolean, `[B, 1, 1, T]` or `[B, 1, Q, T]`; all keys without it.

    Returns:
        `[B, Q, H D]`.
    """
    rows, count, heads, dim = queries.shape
    groups = keys.shape[2]
    share = heads // groups
    # All query heads of a group see the same keys: folded into the queries, no key is repeated.
    folded = queries.view(rows, count, groups, share, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(rows, groups, share * count, dim)
    if visible is not None and visible.shape[2] > 1:
        visible = visible.repeat(1, 1, share, 1)
    mixed = nn.functional.scaled_dot_product_attention(
        folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=visible
    )
    mixed = mixed.view(rows, groups, share, count, dim).permute(0, 3, 1, 2, 4)
    return mixed.reshape(rows, count, heads * dim)


class Layer(nn.Module):
    """One layer: attention and a gated MLP, each behind a norm."""

    def __init__(self, shape: DecoderShape) -> None:
        """Make the layer's modules.

        Args:
            shape: Of the decoder.
        """
        super().__init__()
        self.dims = (shape.query_heads, shape.kv_heads, shape.head_dim)
        width, epsilon = shape.query_heads * shape.head_dim, shape.norm_epsilon
        self.attention_norm = nn.RMSNorm(shape.hidden, epsilon)
        self.query = nn.Linear(shape.hidden, width, bias=shape.qkv_bias)
        self.key = nn.Linear(shape.hidden, shape.value_width, bias=shape.qkv_bias)
        self.value = nn.Linear(shape.hidden, shape.value_width, bias=shape.qkv_bias)
        self.output = nn.Linear(width, shape.hidden, bias=shape.output_bias)
        normed = shape.query_key_norm
        self.query_norm = nn.RMSNorm(shape.head_dim, epsilon) if normed else nn.Identity()
        self.key_norm = nn.RMSNorm(shape.head_dim, epsilon) if normed else nn.Identity()
        self.mlp_norm = nn.RMSNorm(shape.hidden, epsilon)
        self.gate = nn.Linear(shape.hidden, shape.mlp, bias=shape.mlp_bias)
        self.up = nn.Linear(shape.hidden, shape.mlp, bias=shape.mlp_bias)
        self.down = nn.Linear(shape.mlp, shape.hidden, bias=shape.mlp_bias)
        self.activation = _ACTIVATIONS[shape.activation]

    def queries(self, normed: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Rotated queries `[B, K, H, D]` of normed inputs `[B, K, M]`."""
        with part("queries"):
            split = self.query(normed).unflatten(-1, (self.dims[0], self.dims[2]))
            return rotate(self.query_norm(split), *angles)

    def keys(self, normed: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Rotated keys `[B, K, G, D]` of normed inputs `[B, K, M]`."""
        with part("keys and values"):
            split = self.key(normed).unflatten(-1, self.dims[1:])
            return rotate(self.key_norm(split), *angles)

    def values(self, normed: torch.Tensor) -> torch.Tensor:
        """Values `[B, K, G, D]` of normed inputs `[B, K, M]`."""
        with part("keys and values"):
            return self.value(normed).unflatten(-1, self.dims[1:])

    def attended(
        self,
        hidden: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> torch.Tensor:
        """The layer's output `[B, K, M]` for tokens of which it has the queries.

        Args:
            hidden: The layer's input at these tokens, `[B, K, M]`.
            queries: `[B, K, H, D]`.
            keys: Of all tokens, `[B, T, G, D]`.
            values: Likewise.
            visible: As `attend` takes it.
        """
        with part("attention"):
            mixed = attend(queries, keys, values, visible)
        with part("output"):
            hidden = hidden + self.output(mixed)
        with part("MLP"):
            normed = self.mlp_norm(hidden)
            return hidden + self.down(self.activation(self.gate(normed)) * self.up(normed))

    def forward(
        self, hidden: torch.Tensor, angles: Angles, visible: torch.Tensor | None
    ) -> torch.Tensor:
        """The layer for all tokens, `[B, T, M]` to `[B, T, M]`."""
        normed = self.attention_norm(hidden)
        keys, values = self.keys(normed, angles), self.values(normed)
        return self.attended(hidden, self.queries(normed, angles), keys, values, visible)


class Decoder(nn.Module):
    """Embedding, layers, last norm and head."""

    def __init__(self, shape: DecoderShape) -> None:
        """Make the modules, with torch's own initial weights.

        Args:
            shape: Sizes and flags.
        """
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_epsilon)
        tied = shape.tied_head
        self.head = None if tied else nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    @property
    def blocks(self) -> list[Layer]:
        """The layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def angles(self, positions: torch.Tensor) -> Angles:
        """Cosines and sines `[B, T, 1, D]` at logical positions `[B, T]`."""
        dims = torch.arange(0, self.shape.head_dim, 2, device=positions.device).float()
        frequencies = self.shape.rope_theta ** -(dims / self.shape.head_dim)
        turns = positions[:, :, None, None].float() * frequencies
        turns = torch.cat([turns, turns], dim=-1)
        return turns.cos(), turns.sin()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V]` of the last layer's outputs `[..., M]`."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        with part("logits"):
            return nn.functional.linear(self.norm(hidden), weight)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The dense forward: the last layer's outputs, before the last norm.

        Args:
            ids: `[B, T]`.
            positions: Logical positions, `[B, T]`.
            visible: Boolean, `[B, 1, 1, T]` or `[B, 1, T, T]`; all see all without it.

        Returns:
            `[B, T, M]`.
        """
        hidden, angles = self.embedding(ids), self.angles(positions)
        for layer in self.layers:
            hidden = layer(hidden, angles, visible)
        return hidden
