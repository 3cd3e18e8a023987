"""What a codec is compared with: other ways to hand a prefix over, as caches and bytes.

- `oracle`: the consumer reads the prefix itself; nothing travels.
- `raw`: the producer's cache as it is, keys turned by the producer's angles, in bfloat16.
- `rerotated`: the same, but keys turned back and turned again by the consumer's angles: where the
  two models' RoPE differ, all of raw's loss may be that alone.
- `int8`, `int4`: the second in few bits, one step for each head of each token, in float16.
- `recompute`: the second, but the consumer computes some layers in a row itself, of the producer's
  residual stream before the first of them, which travels in their place (as DroidSpeak does).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from kvfold.cache import KVCache
from kvfold.errors import ConfigError
from kvfold.models import decoder_layers
from kvfold.ops.quantize import dequantise, quantise, scales_of
from kvfold.transfer.assemble import Assembly
from kvfold.transfer.endpoint import Endpoint, Trace, positions_of
from kvfold.transfer.ends import row_lengths

Baseline = Literal["oracle", "raw", "rerotated", "int8", "int4", "recompute"]
"""Ways to hand a prefix over without a codec."""

BASELINES: tuple[Baseline, ...] = get_args(Baseline)
"""All of them."""

States = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class HandedOver:
    """A consumer's cache, and what travelled for it."""

    cache: KVCache
    """Has seen the whole prefix."""
    payload: int
    """Bytes, without any header."""


def hand_over_by(
    name: Baseline,
    producer: Endpoint,
    consumer: Endpoint,
    ids: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    layers: range | None = None,
    trace: Trace | None = None,
) -> HandedOver:
    """Hand a prefix over without a codec.

    Args:
        name: How.
        producer: Reads the prefix, but for `oracle`.
        consumer: Attached; goes on from it.
        ids: Token ids, `[B, T]`, left padded.
        mask: False for padding, `[B, T]`.
        layers: The layers in a row that `recompute` leaves to the consumer.
        trace: What the model that reads the prefix made of it, where that is known already, for
            `recompute` with the residual stream before its layers.

    Raises:
        ConfigError: For another name, or `recompute` without layers.
    """
    if name not in BASELINES:
        raise ConfigError(f"there is no baseline {name!r}: choose one of {', '.join(BASELINES)}")
    if name == "recompute":
        layers = _row_of_layers(consumer, layers)
        if trace is None:
            trace = producer.read(ids, mask=mask, residual=layers[:1])
        return _recompute(trace, consumer, ids, mask, layers)
    if trace is None:
        trace = (consumer if name == "oracle" else producer).read(ids, mask=mask)
    turns = consumer.turns(positions_of(ids.shape[1], trace.tokens, ids.device))
    found, payload = [], 0
    for layer in consumer.layers:
        if name == "raw":
            # Kept as they are: turned back by the angles that they are about to be turned by.
            keys = trace.rotated[layer][0].bfloat16().float()
            states = trace.rows(consumer.unturn(layer, keys, turns)), trace.values(layer)
        else:
            states = trace.keys(layer), trace.values(layer)
        heads = consumer.anatomy.layers[layer].heads.kv_heads
        coded = [_coded(name, rows, heads) for rows in states]
        found.append((coded[0][0], coded[1][0]))
        payload += coded[0][1] + coded[1][1]
    return HandedOver(_assembled(consumer, found, ids, mask), payload)


def _coded(name: Baseline, rows: torch.Tensor, heads: int) -> tuple[torch.Tensor, int]:
    """Rows `[N, G * D]` as they arrive, and their bytes."""
    if name == "oracle":
        return rows, 0
    if name in ("raw", "rerotated"):
        return rows.bfloat16().float(), 2 * rows.numel()
    bits = 8 if name == "int8" else 4
    own = rows.unflatten(-1, (heads, -1))
    steps = scales_of(own, bits, -1).half().float()
    arrived = dequantise(quantise(own, steps, bits), steps, torch.float32).flatten(1)
    return arrived, rows.numel() * bits // 8 + 2 * steps.numel()


def _assembled(
    consumer: Endpoint, states: Sequence[States], ids: torch.Tensor, mask: torch.Tensor | None
) -> KVCache:
    assembly = Assembly(consumer, row_lengths(ids, mask), width=ids.shape[1])
    for layer, (keys, values) in enumerate(states):
        assembly.put(layer, keys, values)
    return assembly.finish()


def _row_of_layers(consumer: Endpoint, layers: range | None) -> range:
    """The layers that `recompute` leaves to the consumer, if they can be that."""
    if layers is None or layers.step != 1 or not set(layers) <= set(consumer.layers) or not layers:
        raise ConfigError(
            f"recompute needs layers in a row out of {consumer.layers.stop}, not {layers}: give a "
            "range such as range(8, 14)"
        )
    return layers


def _recompute(
    trace: Trace,
    consumer: Endpoint,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    layers: range,
) -> HandedOver:
    """Layers in a row are the consumer's own, of the producer's residual stream.

    It is computed by a whole forward of the consumer into which the residual stream is put: what
    comes out is right, the time it takes is not the method's.
    """
    residual = trace.residual[layers.start]
    with _given(consumer, layers.start, residual.to(consumer.model.dtype)):
        own = consumer.read(ids, mask=mask)
    found, payload = [], 2 * trace.rows(residual[:, None]).numel()
    for layer in consumer.layers:
        if layer in layers:
            found.append((own.keys(layer), own.values(layer)))
            continue
        keys, values = trace.keys(layer), trace.values(layer)
        found.append((keys.bfloat16().float(), values.bfloat16().float()))
        payload += 2 * (keys.numel() + values.numel())
    return HandedOver(_assembled(consumer, found, ids, mask), payload)


@contextmanager
def _given(endpoint: Endpoint, layer: int, residual: torch.Tensor) -> Iterator[None]:
    """Put a residual stream in place of what a decoder layer is given."""

    def hook(module: nn.Module, arguments: tuple, keywords: dict) -> tuple[tuple, dict]:
        if arguments:
            return (residual, *arguments[1:]), keywords
        return arguments, {**keywords, "hidden_states": residual}

    handle = decoder_layers(endpoint.model)[layer].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
