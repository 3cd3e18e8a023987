"""What a codec does to the consumer's predictions, measured on a few texts.

Each text is a prefix and a continuation. The reference is what the consumer says of the
continuation over its own cache of the prefix; a candidate is what it says over other states of some
layers: `KL(P_B(. | own) || P_B(. | candidate))`, the mean over tokens, in nats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvfold.errors import ConfigError
from kvfold.ops.divergence import kl_divergence
from kvfold.transfer.assemble import Assembly
from kvfold.transfer.batches import batches
from kvfold.transfer.coder import Coder, decode_layer, encode_layer, moved
from kvfold.transfer.endpoint import Trace, attention_inputs
from kvfold.transfer.streams import Pair

States = tuple[torch.Tensor, torch.Tensor]
"""Keys before RoPE and values of a layer, `[N, G * D]`, of all texts."""

SHORTEST = 8
"""Fewest tokens of a prefix."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Texts of one length, that are read together."""

    lengths: list[int]
    """Tokens of each prefix."""
    rest: torch.Tensor
    """What follows them, `[B, C]`."""
    trace: Trace
    """What the producer made of the prefixes."""

    @property
    def count(self) -> int:
        """Tokens of all prefixes."""
        return sum(self.lengths)


class Probes:
    """A few texts that both models have read."""

    def __init__(
        self, pair: Pair, texts: Sequence[torch.Tensor], continuation: int, *, hidden: bool
    ) -> None:
        """Read the texts, of any lengths.

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
        self._producer, self._consumer = pair.producer, pair.consumer
        self.continuation = continuation
        """Last tokens of each text, that predictions are compared on."""
        self._groups: list[_Group] = []
        layers, wanted, heard = pair.consumer.layers, pair.producer.layers if hidden else (), []
        for group in batches(texts, len(texts)):
            ids = group.to(pair.consumer.model.device)
            prefix, rest = ids[:, :-continuation], ids[:, -continuation:]
            trace = pair.producer.read(prefix, hidden=wanted)
            self._groups.append(_Group([prefix.shape[1]] * len(ids), rest, trace))
            heard.append(pair.consumer.read(prefix, hidden=layers))
        self.own: list[States] = [
            _joined([(trace.keys(layer), trace.values(layer)) for trace in heard])
            for layer in layers
        ]
        """What the consumer made of the prefixes, by layer, group after group."""
        self.own_inputs = [_cat([trace.inputs(layer) for trace in heard]) for layer in layers]
        """What its attention was given, `[N, M]`, by layer."""
        self._references = self._logits({})

    def divergence(self, states: Mapping[int, States]) -> float:
        """Mean divergence where some layers hold these states, and the rest the consumer's own.

        Each text counts the same, however long its prefix is.
        """
        pairs = zip(self._references, self._logits(states), strict=True)
        return float(torch.cat([kl_divergence(own, found) for own, found in pairs]).mean())

    @torch.no_grad()
    def decoded(self, layer: int, coder: Coder) -> States:
        """The states of a layer after a coder."""
        first, second = self._producer.model.device, self._consumer.model.device
        encoder, decoder = moved(coder, first), moved(coder, second)
        found = []
        for group in self._groups:
            packed = encode_layer(encoder, group.trace, layer)
            packed = {name: tensor.to(second) for name, tensor in packed.items()}
            found.append(decode_layer(decoder, self._consumer, layer, packed, group.count))
        return _joined(found)

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
    def _logits(self, states: Mapping[int, States]) -> list[torch.Tensor]:
        """Logits of the continuation, `[B, C, V]` of each group."""
        found, begin = [], 0
        for group in self._groups:
            assembly, end = Assembly(self._consumer, group.lengths), begin + group.count
            for layer in self._consumer.layers:
                keys, values = states.get(layer, self.own[layer])
                assembly.put(layer, keys[begin:end], values[begin:end])
            found.append(self._consumer.continued(assembly.finish(), group.rest))
            begin = end
        return found


def _joined(states: Sequence[States]) -> States:
    """States of several groups, one after the other."""
    keys, values = zip(*states, strict=True)
    return _cat(keys), _cat(values)


def _cat(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of several groups as one; those of one alone are not copied."""
    return rows[0] if len(rows) == 1 else torch.cat(tuple(rows))


def _share(found: torch.Tensor, own: torch.Tensor) -> float:
    spread = (own - own.mean(0)).square().sum().clamp_min(torch.finfo(own.dtype).tiny)
    return float((found - own).square().sum() / spread)
