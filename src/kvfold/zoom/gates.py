"""The learned parts of SeKV (arXiv 2606.31145): what a query expands, and to which rank.

A query head of a layer expands a span S when its gate exceeds its threshold:

    gate = sigmoid((W q) . norm(W kbar_S) / sqrt(P) + log |S|)

with kbar_S the surprisal-weighted mean of the span's rotated keys. Two small networks, shared by
all layers and heads, say how much of each singular value of a span's keys and values is used.

Departures: keys and values have a rank network each. W is a trained matrix times a gain that is
fixed before training, so that one learning rate suits heads whose queries are of all lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

ROUTING = 32
"""Dims of the routing space, or the head dim where that is smaller."""
RANK = 32
"""Singular values that the rank networks look at; a span has at most so many."""
HIDDEN = 64
"""Units of each hidden layer of a rank network."""
FIRST_THRESHOLD = 0.05
"""Of every gate before training (paper)."""

_FIRST_RANK = 2.0
"""Logit of each rank gate before training, nearly: everything is used at first."""
_LEAST = 1e-4
"""Thresholds are this far from 0 and 1 at least."""
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class GateShape:
    """What the sizes of gates follow from."""

    layers: int
    """L, those with full attention: the ones that zoom."""
    query_heads: int
    """H of each."""
    head_dim: int
    """D of keys."""

    @property
    def routing(self) -> int:
        """P."""
        return min(ROUTING, self.head_dim)


class Gates(nn.Module):
    """The gates of one model.

    Layers are counted among those that zoom, from 0. All is computed in float32.

    Attributes:
        route: The trained part of W, `[L, H, P, D]`.
        gain: The fixed factor on it, `[L, H]`.
        thresholds: Of the gates, as probabilities, `[L, H]`.
        keys: Rank network for keys.
        values: Rank network for values.
    """

    gain: torch.Tensor

    def __init__(self, shape: GateShape, *, generator: torch.Generator) -> None:
        """Start with random directions, the paper's threshold, and every rank in use.

        Args:
            shape: Of the model.
            generator: Draws the weights; the global one is left alone.
        """
        super().__init__()
        self.shape = shape
        size = (shape.layers, shape.query_heads, shape.routing, shape.head_dim)
        self.route = nn.Parameter(torch.randn(size, generator=generator) * shape.head_dim**-0.5)
        self.register_buffer("gain", torch.ones(size[:2]))
        self.thresholds = nn.Parameter(torch.full(size[:2], FIRST_THRESHOLD))
        self.keys = _rank_network(shape.head_dim, generator)
        self.values = _rank_network(shape.head_dim, generator)

    def weights(self, layer: int) -> torch.Tensor:
        """W of a layer's query heads, `[H, P, D]`."""
        return self.route[layer] * self.gain[layer, :, None, None]

    def norms(self, layer: int, means: torch.Tensor) -> torch.Tensor:
        """What makes a span's routing key a unit vector: with it, the mean key is all one keeps.

        Args:
            layer: Which, among those that zoom.
            means: Mean rotated keys, `[B, G, S, D]`.

        Returns:
            `1 / |W kbar_S|` for every query head, `[B, H, S]`; 0 where that is 0.
        """
        weights = self.weights(layer).unflatten(0, (means.shape[1], -1))
        projected = torch.einsum("grpd,bgsd->bgrsp", weights, means.float()).flatten(1, 2)
        # The norm has no gradient at 0.
        is_zero = (projected == 0).all(-1)
        lengths = projected.masked_fill(is_zero.unsqueeze(-1), 1.0).norm(dim=-1)
        return lengths.reciprocal().masked_fill(is_zero, 0.0)

    def logits(
        self,
        layer: int,
        query: torch.Tensor,
        means: torch.Tensor,
        norms: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """The gates of spans before the sigmoid.

        Args:
            layer: Which, among those that zoom.
            query: `[B, G, H/G, Q, D]`, rotated and scaled by the factor of attention scores, which
                W has learnt to expect: it is not undone.
            means: Mean rotated keys, `[B, G, S, D]`.
            norms: What `norms` says of them, `[B, H, S]`.
            lengths: Tokens of each span, `[B, S]`.

        Returns:
            `[B, G, H/G, Q, S]` in float32; minus infinity where a span has no token.
        """
        groups, repeats = query.shape[1:3]
        weights = self.weights(layer)
        squares = (weights.mT @ weights).unflatten(0, (groups, repeats))
        routed = torch.einsum("grde,bgrqe->bgrqd", squares, query.float())
        products = torch.einsum("bgrqd,bgsd->bgrqs", routed, means.float())
        scale = norms.unflatten(1, (groups, repeats)).unsqueeze(3) * self.shape.routing**-0.5
        return products * scale + lengths.float().log()[:, None, None, None]

    def thresholds_of(self, layer: int) -> torch.Tensor:
        """The logits above which the heads of a layer expand, `[H]`."""
        return self.thresholds[layer].clamp(_LEAST, 1 - _LEAST).logit()

    def key_ranks(self, singular: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
        """How much of each singular value of a span's keys is used.

        Args:
            singular: Singular values, the greatest first, `[..., N]`, N at most 32.
            means: Mean rotated key of the span, `[..., D]`.

        Returns:
            From 0 to 1, `[..., N]`; what is used is what exceeds a half.
        """
        return _ranks(self.keys, singular, means)

    def value_ranks(self, singular: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
        """The same of a span's values: their singular values, and the mean key again."""
        return _ranks(self.values, singular, means)


def _ranks(network: nn.Sequential, singular: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    count = singular.shape[-1]
    relative = singular.float() / singular[..., :1].float().clamp_min(_TINY)
    padded = torch.nn.functional.pad(relative, (0, RANK - count))
    unit = torch.nn.functional.normalize(means.float(), dim=-1)
    return network(torch.cat([padded, unit], dim=-1)).sigmoid()[..., :count]


def _rank_network(head_dim: int, generator: torch.Generator) -> nn.Sequential:
    network = nn.Sequential(
        _linear(RANK + head_dim, HIDDEN, generator),
        nn.GELU(),
        _linear(HIDDEN, HIDDEN, generator),
        nn.GELU(),
        _linear(HIDDEN, RANK, generator),
    )
    last = network[-1]
    assert isinstance(last, nn.Linear)
    nn.init.constant_(last.bias, _FIRST_RANK)
    return network


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    # Plain nn.Linear would first draw weights from the global generator.
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
    assert isinstance(layer, nn.Linear)
    nn.init.uniform_(layer.weight, -(inputs**-0.5), inputs**-0.5, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer
