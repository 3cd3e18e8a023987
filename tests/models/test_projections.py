"""Projections against what the model's own modules yield in a forward."""

import pytest
import torch
from torch import Tensor, nn

from kvfold.errors import UnsupportedModelError
from kvfold.models import (
    attention_module,
    decoder_layers,
    final_norm,
    head_shape,
    input_norm,
    key_weight,
    lm_head,
    output_projection,
    output_weight,
    project,
    projection_bias,
    projection_weight,
    query_weight,
    value_weight,
)
from tests.tiny import SUPPORTED, tiny_ids, tiny_model

INDEX = 1


def record(model: nn.Module, modules: dict[str, nn.Module]) -> dict[str, tuple[Tensor, Tensor]]:
    """Runs a forward and returns input and output of the named modules."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in modules.items():

        def hook(_: nn.Module, inputs: tuple[Tensor], output: Tensor, name: str = name) -> None:
            seen[name] = (inputs[0], output)

        module.register_forward_hook(hook)
    layer_inputs: list[Tensor] = []
    decoder_layers(model)[INDEX].register_forward_pre_hook(
        lambda _, args: layer_inputs.append(args[0])
    )
    with torch.no_grad():
        model(tiny_ids(1, 7))
    seen["layer"] = (layer_inputs[0], layer_inputs[0])
    return seen


def own_projections(model: nn.Module) -> dict[str, nn.Module]:
    attention = attention_module(model, INDEX)
    names = ("q_proj", "k_proj", "v_proj", "qkv_proj")
    return {name: getattr(attention, name) for name in names if hasattr(attention, name)}


@pytest.mark.parametrize("kind", SUPPORTED)
@torch.no_grad()
def test_weights_reproduce_the_models_own_projections(kind: str) -> None:
    model = tiny_model(kind)
    seen = record(model, own_projections(model))
    if "qkv_proj" in seen:
        query, key, value = seen["qkv_proj"][1].split([64, 32, 32], -1)
    else:
        query, key, value = (seen[name][1] for name in ("q_proj", "k_proj", "v_proj"))
    hidden = input_norm(model, INDEX)(seen["layer"][0])
    for part, expected in (("query", query), ("key", key), ("value", value)):
        bias = projection_bias(model, INDEX, part)
        found = nn.functional.linear(hidden, projection_weight(model, INDEX, part), bias)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        heads = project(model, INDEX, part, hidden)
        torch.testing.assert_close(heads.transpose(1, 2).flatten(2), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_shapes_and_views(kind: str) -> None:
    model = tiny_model(kind)
    assert query_weight(model, 0).shape == (64, 64)
    assert key_weight(model, 0).shape == value_weight(model, 0).shape == (32, 64)
    assert output_weight(model, 0).shape == (64, 64)
    with torch.no_grad():
        key_weight(model, 0).zero_()
    hidden = torch.ones(1, 3, 64)
    assert project(model, 0, "key", hidden).abs().max() == 0
    assert project(model, 0, "value", hidden).abs().max() > 0
    assert project(model, 0, "query", hidden).shape == (1, 4, 3, 16)


@pytest.mark.parametrize("kind", SUPPORTED)
@torch.no_grad()
def test_head_and_final_norm_are_the_models(kind: str) -> None:
    model = tiny_model(kind)
    seen = record(model, {"norm": final_norm(model), "head": lm_head(model)})
    torch.testing.assert_close(seen["head"][0], seen["norm"][1])
    assert seen["head"][1].shape[-1] == 257
    assert output_projection(model, 0).out_features == 64


def test_a_post_norm_layer_has_the_identity_as_input_norm() -> None:
    assert isinstance(input_norm(tiny_model("olmo2"), 0), nn.Identity)
    assert not isinstance(input_norm(tiny_model("llama"), 0), nn.Identity)


def test_packed_weights_are_refused() -> None:
    model = tiny_model("llama")
    packed = nn.Parameter(torch.zeros(32, 64, dtype=torch.int8), requires_grad=False)
    attention_module(model, 0).k_proj.weight = packed
    with pytest.raises(UnsupportedModelError, match="key projection of layer 0 holds packed"):
        key_weight(model, 0)


def test_heads_that_do_not_divide_are_refused() -> None:
    model = tiny_model("llama")
    attention_module(model, 0).head_dim = 24
    with pytest.raises(UnsupportedModelError, match="not a whole number of heads of 24"):
        head_shape(model, 0)
