"""What a codec does to the consumer's predictions, measured on a few texts.

Each text is a prefix and a continuation. The reference is what the consumer says of the
continuation over its own cache of the prefix; a candidate is what it says over other states of some
layers: `KL(P_B(. | own) || P_B(. | candidate))`, the mean over tokens, in nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvfold.errors import ConfigError
from kvfold.ops.divergence import kl_divergence
from kvfold.transfer.assemble import Assembly
from kvfold.transfer.coder import Coder, decode_layer, encode_layer, moved
from kvfold.transfer.endpoint import attention_inputs
from kvfold.transfer.streams import Pair

States = tuple[torch.Tensor, torch.Tensor]
"""Keys before RoPE and values of a layer, `[N, G * D]`."""

SHORTEST = 8
"""Fewest tokens of a prefix."""


class Probes:
    """A few texts that both models have read."""

    def __init__(
        self, pair: Pair, texts: Sequence[torch.Tensor], continuation: int, *, hidden: bool
    ) -> None:
        """Read the texts; all are cut to the length of the shortest.

        Args:
            pair: The models; the consumer is attached.
            texts: Token ids, `[T]` each.
            continuation: Last tokens of each that predictions are compared on.
            hidden: Whether the attention's inputs are wanted, for patches.

        Raises:
            ConfigError: When a text is too short.
        """
        length = min(map(len, texts))
        if length < continuation + SHORTEST:
            raise ConfigError(
                f"a text of {length} tokens is too short to measure by: give texts of at least "
                f"{continuation + SHORTEST}, or compare fewer tokens"
            )
        ids = torch.stack([text[:length] for text in texts])
        self._producer, self._consumer = pair.producer, pair.consumer
        ids = ids.to(pair.consumer.model.device)
        prefix, self._rest = ids[:, :-continuation], ids[:, -continuation:]
        self.continuation = continuation
        """Last tokens of each text, that predictions are compared on."""
        self._lengths = [prefix.shape[1]] * len(texts)
        wanted = pair.producer.layers if hidden else ()
        self.trace = pair.producer.read(prefix, hidden=wanted)
        """What the producer made of the prefixes."""
        own = pair.consumer.read(prefix, hidden=pair.consumer.layers)
        self.own: list[States] = [
            (own.keys(layer), own.values(layer)) for layer in pair.consumer.layers
        ]
        """What the consumer made of them, by layer."""
        self.own_inputs = [own.inputs(layer) for layer in pair.consumer.layers]
        """What its attention was given, `[N, M]`, by layer."""
        self._reference = self._logits({})

    @property
    def count(self) -> int:
        """Tokens of all prefixes."""
        return sum(self._lengths)

    def divergence(self, states: Mapping[int, States]) -> float:
        """Mean divergence where some layers hold these states, and the rest the consumer's own."""
        return float(kl_divergence(self._reference, self._logits(states)).mean())

    @torch.no_grad()
    def decoded(self, layer: int, coder: Coder) -> States:
        """The states of a layer after a coder."""
        first, second = self._producer.model.device, self._consumer.model.device
        packed = encode_layer(moved(coder, first), self.trace, layer)
        packed = {name: tensor.to(second) for name, tensor in packed.items()}
        return decode_layer(moved(coder, second), self._consumer, layer, packed, self.count)

    def all_decoded(self, coders: Sequence[Coder]) -> dict[int, States]:
        """The states of all layers after their coders."""
        return {layer: self.decoded(layer, coder) for layer, coder in enumerate(coders)}

    def errors(self, states: Mapping[int, States]) -> dict[int, tuple[float, float]]:
        """Squared errors of keys and of values, as shares of their variances, by layer."""
        return {
            layer: (_share(found[0], self.own[layer][0]), _share(found[1], self.own[layer][1]))
            for layer, found in states.items()
        }

    def growth(self, states: Mapping[int, States]) -> list[float]:
        """Relative errors of what each layer's attention is given over the continuation.

        The reference is the same model over its own states. What a layer is given carries the
        errors of all layers before it.
        """
        heard = []
        for candidate in ({}, states):
            with attention_inputs(self._consumer.model, self._consumer.layers) as inputs:
                self._logits(candidate)
            heard.append({layer: torch.cat(given).float() for layer, given in inputs.items()})
        return [
            float((heard[1][layer] - own).norm() / own.norm()) for layer, own in heard[0].items()
        ]

    @torch.no_grad()
    def _logits(self, states: Mapping[int, States]) -> torch.Tensor:
        """Logits of the continuation, `[P, C, V]`."""
        assembly = Assembly(self._consumer, self._lengths)
        for layer in self._consumer.layers:
            assembly.put(layer, *states.get(layer, self.own[layer]))
        return self._consumer.continued(assembly.finish(), self._rest)


def _share(found: torch.Tensor, own: torch.Tensor) -> float:
    spread = (own - own.mean(0)).square().sum().clamp_min(torch.finfo(own.dtype).tiny)
    return float((found - own).square().sum() / spread)
