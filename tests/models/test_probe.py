"""The probe finds which layers rotate their keys."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cohere2Config

from kvfold.errors import ConfigError
from kvfold.models import attention_module, probe_rope
from tests.tiny import SHARED, SUPPORTED, tiny_config, tiny_model


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_family(kind: str) -> None:
    model = tiny_model(kind)
    expected = ["rope"] * model.config.num_hidden_layers
    if kind == "smollm3":
        expected[3] = "nope"
    assert probe_rope(model) == expected


def test_nope_that_is_not_declared_is_found() -> None:
    config = Cohere2Config(**{**SHARED, "num_hidden_layers": 4, "sliding_window": 24})
    model = AutoModelForCausalLM.from_config(config).eval()
    assert probe_rope(model) == ["interleaved", "interleaved", "interleaved", "nope"]


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("llama", {"rope_type": "linear", "factor": 3.0}),
        (
            "llama",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        ),
        ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
)
def test_scaled_and_partial_rope(kind: str, rope: dict[str, object]) -> None:
    model = tiny_model(kind, rope_parameters={"rope_theta": 1e4, **rope})
    assert probe_rope(model) == ["rope"] * 3


def test_bfloat16() -> None:
    assert probe_rope(tiny_model("qwen3").to(torch.bfloat16)) == ["rope"] * 3


def test_as_many_kv_heads_as_might_be_tokens() -> None:
    model = tiny_model("qwen3", num_attention_heads=4, num_key_value_heads=4)
    assert probe_rope(model) == ["rope"] * 3


def test_a_key_that_is_neither_is_unknown() -> None:
    model = tiny_model("llama")
    scaled = model.model.rotary_emb.forward

    def distorted(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = scaled(x, position_ids)
        return (cosines, sines) if x.shape[-1] == 16 else (cosines, sines * 1.5)

    model.model.rotary_emb.forward = distorted
    assert probe_rope(model) == ["unknown"] * 3


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("llama").train()
    probe_rope(model)
    assert model.training
    modules: list[nn.Module] = list(attention_module(model, 0).modules())
    assert not any(module._forward_hooks for module in modules)


def test_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with pytest.raises(ConfigError, match="load it first"):
        probe_rope(model)
