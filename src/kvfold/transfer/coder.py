"""How one layer travels: REUSE, its keys and values as codes, or PATCH, its attention's input."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvfold.models.projections import Part
from kvfold.transfer.endpoint import Endpoint, Trace
from kvfold.transfer.patch import Patch
from kvfold.transfer.translator import Translator

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each packed tensor, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Reuse:
    """A layer whose keys and values are translated."""

    keys: Translator
    """Of the keys before RoPE."""
    values: Translator
    """Of the values."""


Coder = Reuse | Patch
"""How a layer travels."""


def translators(coder: Coder) -> dict[str, Translator]:
    """The linear codes of a layer, by the name that their tensors begin with."""
    if isinstance(coder, Patch):
        return {"hidden": coder.inputs}
    return {"key": coder.keys, "value": coder.values}


def patched(coders: Iterable[Coder]) -> list[int]:
    """Indices of the patched layers."""
    return [layer for layer, coder in enumerate(coders) if isinstance(coder, Patch)]


def bits_of(coder: Coder) -> int:
    """Bits of a token."""
    return sum(translator.bits for translator in translators(coder).values())


def layout_of(coder: Coder, count: int) -> Layout:
    """What the packed tensors of `count` tokens look like, by name."""
    return {
        f"{name}.{width}": shape
        for name, translator in translators(coder).items()
        for width, shape in translator.layout(count).items()
    }


def moved(coder: Coder, device: torch.device) -> Coder:
    """The same coder with its tensors on a device."""
    if isinstance(coder, Patch):
        aligner = None if coder.aligner is None else copy.deepcopy(coder.aligner).to(device)
        return Patch(coder.inputs.to(device), aligner)
    return Reuse(coder.keys.to(device), coder.values.to(device))


@torch.no_grad()
def encode_layer(coder: Coder, trace: Trace, layer: int) -> dict[str, torch.Tensor]:
    """Packed tensors of one layer of what a producer read, by name."""
    rows = {"key": trace.keys, "value": trace.values, "hidden": trace.inputs}
    return {
        f"{name}.{width}": tensor
        for name, translator in translators(coder).items()
        for width, tensor in translator.encode(rows[name](layer)).items()
    }


def decode_layer(
    coder: Coder, consumer: Endpoint, layer: int, packed: dict[str, torch.Tensor], count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A consumer's states of one layer, with the coder's graph.

    Args:
        coder: How the layer travelled.
        consumer: The model that is to use it.
        layer: Its index.
        packed: Tensors as `encode_layer` gives them.
        count: N, the tokens in them.

    Returns:
        Keys before RoPE and values, `[N, G * D]` in float32.
    """
    if isinstance(coder, Patch):
        inputs = coder.decode(_of(packed, "hidden"), count)
        parts: tuple[Part, Part] = ("key", "value")
        keys, values = (consumer.project(layer, part, inputs) for part in parts)
        return keys, values
    keys, values = _of(packed, "key"), _of(packed, "value")
    return coder.keys.decode(keys, count), coder.values.decode(values, count)


def _of(packed: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    prefix = f"{name}."
    return {n.removeprefix(prefix): t for n, t in packed.items() if n.startswith(prefix)}
