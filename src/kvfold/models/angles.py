"""The angles by which a layer turns queries and keys, from the model's own RoPE module."""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvfold.models.parts import rotary, text_config
from kvfold.models.projections import head_shape
from kvfold.models.rope import layer_ropes, rope_anatomies


def angles(model: PreTrainedModel, index: int, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the cosines and sines of layer `index` at the given positions.

    Layers that share their RoPE have the same angles: compute them once for many. A layer without
    RoPE that is not declared as such has angles too; `probe_rope` finds it out.

    Args:
        model: A supported decoder.
        index: Of the layer.
        positions: Logical positions [B, T], integers.

    Returns:
        Cosines and sines [B, 1, T, D'] in float32, ready for `kvfold.ops.rotary`, D' the rotated
        dims; or None if the layer declares that it has no RoPE, or the model has it in another form
        than cosines and sines.

    Raises:
        UnsupportedModelError: The model has no RoPE with frequencies that kvfold can read.
    """
    if layer_ropes(model)[index] == "nope":
        return None
    module, kinds = rotary(model), getattr(text_config(model), "layer_types", None)
    arguments: list[object] = [_like_keys(model, index, positions), positions]
    if "layer_type" in inspect.signature(module.forward).parameters and kinds:
        arguments.append(kinds[index])
    found = module(*arguments)
    if not isinstance(found, tuple) or len(found) != 2:
        return None
    kind = kinds[index].removesuffix("_attention") if kinds else "all"
    rope = next(rope for rope in rope_anatomies(model) if rope.kind in ("all", kind))
    cosines, sines = (_full_width(angle.float()[:, None], rope.rotary_dims) for angle in found)
    return cosines, sines


def _like_keys(model: PreTrainedModel, index: int, positions: Tensor) -> Tensor:
    """Nothing but the dtype, device and width of keys, for a module that asks for these."""
    width = head_shape(model, index).head_dim
    return torch.empty(0, width, dtype=torch.float32, device=positions.device)


def _full_width(angles: Tensor, rotary_dims: int) -> Tensor:
    """Repeats angles that are given once for each pair of dims."""
    return torch.cat([angles, angles], -1) if 2 * angles.shape[-1] == rotary_dims else angles
