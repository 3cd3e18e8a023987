"""What is not supported is refused, and the message names what is missing."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, T5Config, T5ForConditionalGeneration

from kvfold.errors import UnsupportedModelError
from kvfold.models import (
    anatomy_of,
    attention_module,
    base_model,
    decoder_layers,
    missing_parts,
    rotary,
)
from tests.tiny import SUPPORTED, tiny_model


@pytest.mark.parametrize("kind", SUPPORTED)
def test_nothing_is_missing_in_supported_families(kind: str) -> None:
    model = tiny_model(kind)
    assert missing_parts(model) == []
    assert base_model(model) is model.model
    assert decoder_layers(model) is model.model.layers
    assert rotary(model) is model.model.rotary_emb


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("gpt2", ["query, key and value projections", "rotary position embedding"]),
        ("bloom", ["query, key and value projections", "rotary position embedding"]),
        ("falcon", ["query, key and value projections"]),
    ],
)
def test_refusals_name_all_that_is_missing(kind: str, missing: list[str]) -> None:
    model = tiny_model(kind)
    with pytest.raises(UnsupportedModelError) as caught:
        anatomy_of(model)
    message = str(caught.value)
    assert message.startswith(f"{type(model).__name__} lacks ")
    assert all(part in message for part in missing)
    assert len(missing_parts(model)) == len(missing)
    assert "\n" not in message


def test_interleaved_fused_projections_are_refused() -> None:
    config = GPTNeoXConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=99,
    )
    with pytest.raises(UnsupportedModelError, match="q_proj, k_proj, v_proj, or one qkv_proj"):
        anatomy_of(AutoModelForCausalLM.from_config(config))


def test_encoder_decoders_are_refused() -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=99)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        anatomy_of(model)


def test_a_layer_without_its_norm_or_output_is_refused() -> None:
    model = tiny_model("llama")
    del decoder_layers(model)[2].input_layernorm
    assert missing_parts(model) == ["a norm before (or after) the attention of layer 2"]
    del attention_module(model, 1).o_proj
    assert missing_parts(model) == ["an attention output projection in layer 1"]


def test_a_model_of_no_layers_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers = nn.ModuleList()
    assert missing_parts(model) == ["at least one decoder layer"]
