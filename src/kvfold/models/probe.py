"""Finds by a short forward which layers rotate their keys (RoPE) and which do not (NoPE).

Some models leave RoPE out of every few layers, and not all of them say so in their configuration.
The probe runs a few tokens, takes each layer's key before RoPE (the output of the key norm if there
is one, else of the key projection) and compares it with the cached key as it is and un-rotated, in
halves and in neighbouring pairs (`kvfold.ops.rotary`).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvfold.errors import ConfigError
from kvfold.models.anatomy import anatomy_of
from kvfold.models.angles import angles
from kvfold.models.parts import (
    attention_module,
    base_model,
    decoder_layers,
    find_module,
    is_separate,
    key_norm,
)
from kvfold.models.projections import head_shape, split_heads
from kvfold.ops.rotary import unrotate

RopeFinding = Literal["rope", "interleaved", "nope", "unknown"]
"""Rotated in halves, rotated in neighbouring pairs, not rotated, or cached some other way."""

_MORE_THAN_HEADS = 3
"""The probe runs this many tokens more than there are kv heads: no shape can be read two ways."""


def probe_rope(model: PreTrainedModel) -> list[RopeFinding]:
    """Returns for each layer how its cached keys relate to the keys before RoPE.

    `unknown` says that the cached key is neither: it cannot be un-rotated.

    Raises:
        ConfigError: The model is on the meta device and cannot be run.
        UnsupportedModelError: The model lacks parts that kvfold needs.
    """
    anatomy = anatomy_of(model)
    if model.device.type == "meta":
        raise ConfigError("a model on the meta device has no weights to probe: load it first")
    tokens = anatomy.kv_heads + _MORE_THAN_HEADS
    ids = torch.arange(1, tokens + 1, device=model.device)[None] % anatomy.vocabulary
    with _recorded_keys(model) as raw, torch.no_grad():
        cache = _run(model, ids)
    return [
        _compare(model, index, raw[index], getattr(cache.layers[index], "keys", None))
        for index in range(len(anatomy.layers))
    ]


def _run(model: PreTrainedModel, ids: Tensor) -> DynamicCache:
    cache = DynamicCache()
    parameters = inspect.signature(base_model(model).forward).parameters
    keyword = "cache" if "cache" in parameters else "past_key_values"
    training = model.training
    model.eval()
    try:
        base_model(model)(input_ids=ids, use_cache=True, **{keyword: cache})
    finally:
        model.train(training)
    return cache


@contextmanager
def _recorded_keys(model: PreTrainedModel) -> Iterator[dict[int, Tensor]]:
    """Records each layer's key before RoPE, as the module yields it, while the context is open."""
    raw: dict[int, Tensor] = {}
    handles = []
    for index in range(len(decoder_layers(model))):

        def record(module: nn.Module, inputs: object, output: Tensor, index: int = index) -> None:
            raw[index] = output.detach()

        handles.append(_key_source(model, index).register_forward_hook(record))
    try:
        yield raw
    finally:
        for handle in handles:
            handle.remove()


def _key_source(model: PreTrainedModel, index: int) -> nn.Module:
    attention = attention_module(model, index)
    name = "k_proj" if is_separate(attention) else "qkv_proj"
    source = key_norm(model, index) or find_module(attention, (name,))
    assert source is not None
    return source


def _compare(model: PreTrainedModel, index: int, raw: Tensor, cached: Tensor | None) -> RopeFinding:
    if cached is None:
        return "unknown"
    expected, found = _as_heads(model, index, raw).float(), cached.float()
    candidates: dict[RopeFinding, Tensor] = {"nope": found}
    turned = angles(model, index, torch.arange(found.shape[-2], device=found.device)[None])
    if turned is not None:
        candidates["rope"] = unrotate(found, *turned)
        candidates["interleaved"] = unrotate(found, *turned, interleaved=True)
    errors: list[tuple[float, RopeFinding]] = [
        (float((key - expected).norm()), name) for name, key in candidates.items()
    ]
    error, best = min(errors)
    tolerance = 1e-3 if cached.dtype == torch.float32 else 3e-2
    return best if error <= tolerance * float(expected.norm()) else "unknown"


def _as_heads(model: PreTrainedModel, index: int, raw: Tensor) -> Tensor:
    """Brings recorded keys, in whichever layout, to [B, G, T, D]."""
    shape = head_shape(model, index)
    if raw.dim() == 3:
        start = 0 if raw.shape[-1] == shape.rows("key") else shape.rows("query")
        return split_heads(raw[..., start : start + shape.rows("key")], shape, "key")
    return raw if raw.shape[1] == shape.kv_heads else raw.transpose(1, 2)
