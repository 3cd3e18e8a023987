"""Query, key, value and output projections of a layer, whether separate or fused.

Axis letters: M hidden size, H query heads, G kv heads, D head dim. A fused projection holds the
rows of query, key and value concatenated in this order: [(H + 2 G) D, M].
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvfold.errors import UnsupportedModelError
from kvfold.models.parts import (
    attention_module,
    find_module,
    is_separate,
    output_projection,
    text_config,
)

Part = Literal["query", "key", "value"]
"""Which of the three inputs of attention a projection yields."""

_SEPARATE_NAMES: dict[Part, str] = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


@dataclass(frozen=True, slots=True)
class HeadShape:
    """How many heads a layer has, and how wide they are."""

    query_heads: int
    """H."""
    kv_heads: int
    """G."""
    head_dim: int
    """D of queries and keys."""
    value_head_dim: int
    """D of values."""

    def rows(self, part: Part) -> int:
        """Returns the number of output features of a projection."""
        if part == "query":
            return self.query_heads * self.head_dim
        return self.kv_heads * (self.head_dim if part == "key" else self.value_head_dim)


def head_shape(model: PreTrainedModel, index: int) -> HeadShape:
    """Reads the head counts and sizes of layer `index` off its projections.

    Raises:
        UnsupportedModelError: The projections' sizes do not divide into heads.
    """
    attention, config = attention_module(model, index), text_config(model)
    head_dim = int(getattr(attention, "head_dim", 0) or _config_head_dim(config))
    if is_separate(attention):
        sizes = [_features(attention, name) for name in _SEPARATE_NAMES.values()]
        query_heads, kv_heads = sizes[0] // head_dim, sizes[1] // head_dim
    else:
        query_heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or query_heads)
        total = _features(attention, "qkv_proj")
        sizes = [query_heads * head_dim, kv_heads * head_dim]
        sizes.append(total - sum(sizes))
    shape = HeadShape(query_heads, kv_heads, head_dim, sizes[2] // max(kv_heads, 1))
    if [shape.rows(part) for part in _SEPARATE_NAMES] != sizes or query_heads % kv_heads:
        raise UnsupportedModelError(
            f"layer {index} projects to {sizes} features (query, key, value), which is not a whole "
            f"number of heads of {head_dim} in groups: kvfold needs equally sized heads"
        )
    return shape


def _config_head_dim(config: object) -> int:
    explicit = getattr(config, "head_dim", None)
    if explicit:
        return int(explicit)
    return int(getattr(config, "hidden_size", 0)) // int(getattr(config, "num_attention_heads", 1))


def _features(attention: nn.Module, name: str) -> int:
    module = getattr(attention, name)
    size = getattr(module, "out_features", None)
    return int(size if size is not None else module.weight.shape[0])


def _rows(model: PreTrainedModel, index: int, part: Part) -> tuple[nn.Module, slice]:
    """Finds the module that yields a part, and which of its output features are the part's."""
    attention = attention_module(model, index)
    if is_separate(attention):
        return getattr(attention, _SEPARATE_NAMES[part]), slice(None)
    shape = head_shape(model, index)
    ends = {"query": shape.rows("query")}
    ends["key"] = ends["query"] + shape.rows("key")
    ends["value"] = ends["key"] + shape.rows("value")
    fused = find_module(attention, ("qkv_proj",))
    assert fused is not None
    return fused, slice(ends[part] - shape.rows(part), ends[part])


def projection_weight(model: PreTrainedModel, index: int, part: Part) -> Tensor:
    """Returns the weight [rows, M] of a projection: a view, so that a change reaches the model.

    Raises:
        UnsupportedModelError: The weight is packed (quantized), so that it has no such view.
    """
    module, rows = _rows(model, index, part)
    weight = module.weight
    expected = head_shape(model, index).rows(part)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise UnsupportedModelError(
            f"the {part} projection of layer {index} holds packed weights: "
            "load the model unquantized"
        )
    view = weight[rows]
    if view.shape[0] != expected:
        raise UnsupportedModelError(
            f"the {part} projection of layer {index} has {view.shape[0]} rows where {expected} "
            "were expected: load the model unquantized"
        )
    return view


def projection_bias(model: PreTrainedModel, index: int, part: Part) -> Tensor | None:
    """Returns the bias [rows] of a projection (a view), or None."""
    module, rows = _rows(model, index, part)
    bias = getattr(module, "bias", None)
    return bias[rows] if isinstance(bias, Tensor) else None


def query_weight(model: PreTrainedModel, index: int) -> Tensor:
    """Returns the query projection's weight [H * D, M] of layer `index`."""
    return projection_weight(model, index, "query")


def key_weight(model: PreTrainedModel, index: int) -> Tensor:
    """Returns the key projection's weight [G * D, M] of layer `index`."""
    return projection_weight(model, index, "key")


def value_weight(model: PreTrainedModel, index: int) -> Tensor:
    """Returns the value projection's weight [G * D, M] of layer `index`."""
    return projection_weight(model, index, "value")


def output_weight(model: PreTrainedModel, index: int) -> Tensor:
    """Returns the output projection's weight [M, H * D] of layer `index`."""
    weight = output_projection(model, index).weight
    assert isinstance(weight, Tensor)
    return weight


def project(model: PreTrainedModel, index: int, part: Part, hidden: Tensor) -> Tensor:
    """Runs a layer's own projection, adapters included.

    Args:
        model: A supported decoder.
        index: Layer.
        part: Query, key or value.
        hidden: What the attention receives, after the input norm, [B, T, M].

    Returns:
        Heads before any q/k norm and before RoPE, [B, H or G, T, D].
    """
    module, rows = _rows(model, index, part)
    return split_heads(module(hidden)[..., rows], head_shape(model, index), part)


def split_heads(features: Tensor, shape: HeadShape, part: Part) -> Tensor:
    """Splits projected features [B, T, heads * D] into [B, heads, T, D]."""
    heads = shape.query_heads if part == "query" else shape.kv_heads
    return torch.unflatten(features, -1, (heads, shape.rows(part) // heads)).transpose(1, 2)
