"""A codec's coders as tensors by name and plain facts, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch

from kvfold.transfer.coder import Coder, Reuse, translators
from kvfold.transfer.patch import Aligner, Patch
from kvfold.transfer.quantiser import Quantiser
from kvfold.transfer.translator import Translator

Facts = dict[str, object]
"""A model's facts, as `kvfold.models.fingerprint_facts` gives them."""

_PARTS = ("mean", "encoder", "decoder", "offset")


def tensors_of(coders: Sequence[Coder]) -> dict[str, torch.Tensor]:
    """Every tensor, by layer, part and name."""
    found: dict[str, torch.Tensor] = {}
    for layer, coder in enumerate(coders):
        for name, translator in translators(coder).items():
            prefix = f"{layer}.{name}"
            found |= {f"{prefix}.{part}": getattr(translator, part) for part in _PARTS}
            found[f"{prefix}.steps"] = translator.quantiser.steps
        if isinstance(coder, Patch) and coder.aligner is not None:
            state = coder.aligner.state_dict()
            found |= {f"{layer}.aligner.{name}": tensor for name, tensor in state.items()}
    return found


def facts_of(coders: Sequence[Coder]) -> list[dict[str, object]]:
    """What the tensors do not tell: kinds, plans, heads and the aligners' widths."""
    return [
        {
            "kind": "patch" if isinstance(coder, Patch) else "reuse",
            "aligner": _hidden(coder),
            "parts": {
                name: {
                    "plan": [list(part) for part in translator.quantiser.plan],
                    "heads": translator.heads,
                }
                for name, translator in translators(coder).items()
            },
        }
        for coder in coders
    ]


def fingerprint_of(facts: Facts) -> str:
    """The fingerprint of the model that the facts are of; see `kvfold.models.fingerprint`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def row_width(facts: Facts, name: str) -> int:
    """Numbers in a token's row of what a layer sends: `key`, `value` or `hidden`.

    Raises:
        KeyError, ValueError: When the facts do not tell.
    """
    if name == "hidden":
        return _number(facts, "hidden_size")
    heads = _number(facts, "kv_heads")
    return heads * _number(facts, "head_dim" if name == "key" else "value_head_dim")


def _number(facts: Facts, name: str) -> int:
    value = facts[name]
    if not isinstance(value, int):
        raise ValueError(f"a model has no {name}")
    return value


def coder_of(layer: int, facts: Mapping, tensors: Mapping[str, torch.Tensor]) -> Coder:
    """A layer's coder of what `facts_of` and `tensors_of` gave.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: When they are not those of a coder.
    """
    parts = {
        name: _translator(f"{layer}.{name}", told, tensors) for name, told in facts["parts"].items()
    }
    if facts["kind"] == "reuse":
        return Reuse(parts["key"], parts["value"])
    if facts["kind"] != "patch":
        raise ValueError(f"layer {layer} is of the unknown kind {facts['kind']!r}")
    inputs = parts["hidden"]
    if facts["aligner"] is None:
        return Patch(inputs, None)
    aligner = Aligner(inputs.quantiser.rank, facts["aligner"], len(inputs.offset))
    aligner.to(inputs.decoder.dtype)
    prefix = f"{layer}.aligner."
    state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    aligner.load_state_dict(state)
    return Patch(inputs, aligner.eval().requires_grad_(False))


def _translator(prefix: str, told: Mapping, tensors: Mapping[str, torch.Tensor]) -> Translator:
    plan = tuple((int(bits), int(count)) for bits, count in told["plan"])
    parts = {part: tensors[f"{prefix}.{part}"] for part in _PARTS}
    quantiser = Quantiser(plan, tensors[f"{prefix}.steps"])
    found = Translator(quantiser=quantiser, heads=int(told["heads"]), **parts)
    rank = quantiser.rank
    if found.encoder.shape != (len(found.mean), rank) or found.heads < 1:
        raise ValueError(f"{prefix} has an encoder of {list(found.encoder.shape)}")
    if found.decoder.shape != (rank, len(found.offset)):
        raise ValueError(f"{prefix} has a decoder of {list(found.decoder.shape)}")
    return found


def _hidden(coder: Coder) -> int | None:
    if not isinstance(coder, Patch) or coder.aligner is None:
        return None
    return coder.aligner.inner.out_features
