"""Tells whether a saved cache, policy or codec belongs to a model.

A fingerprint covers the facts that shape a KV cache and a strided sample of every weight, rounded
to bfloat16 first, so that fp32 and bf16 loads of one checkpoint agree and a fine-tuned one differs.
"""

import hashlib
import json

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvfold.errors import ConfigError
from kvfold.models.anatomy import anatomy_of

_SAMPLES = 64


def fingerprint(model: PreTrainedModel) -> str:
    """Returns the SHA-256, in hexadecimal, over a model's facts and a sample of its weights.

    Raises:
        ConfigError: The model is on the meta device and has no weights.
        UnsupportedModelError: The model lacks parts that kvfold needs.
    """
    facts = json.dumps(fingerprint_facts(model), sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()


def fingerprint_facts(model: PreTrainedModel) -> dict[str, object]:
    """Returns what the fingerprint covers, as plain values: shapes, RoPE, weights checksum."""
    return shape_facts(model) | {"weights": weights_checksum(model)}


def shape_facts(model: PreTrainedModel) -> dict[str, object]:
    """Returns the facts that a model shares with its fine-tuned variants: shapes and RoPE."""
    anatomy = anatomy_of(model)
    return {
        "architecture": anatomy.architecture,
        "layers": len(anatomy.layers),
        "hidden_size": anatomy.hidden_size,
        "query_heads": anatomy.query_heads,
        "kv_heads": anatomy.kv_heads,
        "head_dim": anatomy.head_dim,
        "value_head_dim": anatomy.value_head_dim,
        "vocabulary": anatomy.vocabulary,
        "windows": [layer.window for layer in anatomy.layers],
        "rope": [[rope.kind, rope.theta, rope.rotary_dims, rope.scaling] for rope in anatomy.ropes],
        "query_scale": anatomy.query_scale,
        "rope_layers": [layer.rope for layer in anatomy.layers],
    }


_SAID, _LONGEST = 4, 80
"""Most differences that a sentence names, and most letters of one of them."""


def differing_facts(expected: dict[str, object], found: dict[str, object]) -> str:
    """Says in words what differs between two models' facts; empty when nothing does."""
    names = sorted(expected.keys() | found.keys())
    differing = [name for name in names if expected.get(name) != found.get(name)]
    shapes = [name for name in differing if name != "weights"]
    if differing and not shapes:
        return "the weights differ (another or a fine-tuned checkpoint)"
    said = [_difference(name, found.get(name), expected.get(name)) for name in shapes]
    more = len(said) - _SAID
    return ", ".join(said[:_SAID]) + (f", and {more} more" if more > 0 else "")


def differing_shapes(facts: dict[str, object], model: PreTrainedModel) -> str:
    """Says in words how a model's shape differs from facts that were read from a file."""
    # As JSON has them, tuples are lists.
    return differing_facts(facts, json.loads(json.dumps(shape_facts(model))))


def _difference(name: str, found: object, expected: object) -> str:
    """One of them; what is long is only named."""
    said = f"{name} {found} instead of {expected}"
    return said if len(said) <= _LONGEST else f"other {name}"


@torch.no_grad()
def weights_checksum(model: nn.Module) -> str:
    """Returns the SHA-256, in hexadecimal, over a strided sample of every weight.

    Raises:
        ConfigError: A weight is on the meta device.
    """
    if any(weight.is_meta for weight in model.parameters()):
        raise ConfigError("a model on the meta device has no weights to fingerprint: load it first")
    samples = torch.cat([_sample(weight) for weight in model.parameters()])
    return hashlib.sha256(samples.cpu().view(torch.int16).numpy().tobytes()).hexdigest()


def _sample(weight: Tensor) -> Tensor:
    flat = weight.reshape(-1)
    stride = max(1, flat.numel() // _SAMPLES)
    return flat[::stride][:_SAMPLES].to(torch.bfloat16)
