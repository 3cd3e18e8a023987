"""The anatomy of every family: against known values and against what a forward really does."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvfold.models import anatomy_of, text_config
from tests.tiny import SUPPORTED, WINDOW, tiny_ids, tiny_model


@pytest.mark.parametrize("kind", SUPPORTED)
def test_sizes_are_those_of_the_config(kind: str) -> None:
    model = tiny_model(kind)
    anatomy = anatomy_of(model)
    assert anatomy.architecture == type(model).__name__
    assert (anatomy.query_heads, anatomy.kv_heads) == (4, 2)
    assert (anatomy.head_dim, anatomy.value_head_dim) == (16, 16)
    assert (anatomy.hidden_size, anatomy.vocabulary, anatomy.max_positions) == (64, 257, 2048)
    assert [layer.index for layer in anatomy.layers] == list(range(model.config.num_hidden_layers))
    assert anatomy.layers[1].attention_path == "model.layers.1.self_attn"
    assert anatomy.tied_embeddings == model.config.tie_word_embeddings


@pytest.mark.parametrize("kind", SUPPORTED)
def test_kv_bytes_are_those_of_a_cache(kind: str) -> None:
    model = tiny_model(kind)
    anatomy = anatomy_of(model)
    for tokens in (5, 40):
        cache = DynamicCache(config=model.config)
        for index in range(len(anatomy.layers)):
            states = torch.zeros(1, 2, tokens, 16)
            cache.update(states, states, index)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert anatomy.kv_bytes(tokens) == held
        assert anatomy.kv_bytes(tokens, torch.bfloat16) == held // 2


def test_windowed_layers_are_counted_apart() -> None:
    anatomy = anatomy_of(tiny_model("gemma3"))
    layer = 2 * 2 * 16 * 4
    assert anatomy.kv_bytes_per_token() == layer
    assert anatomy.windowed_bytes_per_token() == 5 * layer
    assert [layer.kind for layer in anatomy.layers] == ["sliding"] * 5 + ["full"]
    assert [layer.window for layer in anatomy.layers] == [WINDOW] * 5 + [None]


@pytest.mark.parametrize(
    ("kind", "layout", "norm", "bias"),
    [
        ("llama", "separate", "none", False),
        ("qwen2", "separate", "none", True),
        ("qwen3", "separate", "head", False),
        ("phi3", "fused", "none", False),
        ("gemma3", "separate", "head", False),
        ("olmo2", "separate", "full", False),
    ],
)
def test_projection_facts(kind: str, layout: str, norm: str, *, bias: bool) -> None:
    anatomy = anatomy_of(tiny_model(kind))
    assert (anatomy.qkv_layout, anatomy.qk_norm, anatomy.qkv_bias) == (layout, norm, bias)


def test_each_kind_of_layer_may_have_its_own_rope() -> None:
    anatomy = anatomy_of(tiny_model("gemma3"))
    assert [anatomy.rope_of(index).theta for index in range(6)] == [1e4] * 5 + [1e6]


def test_partial_rope() -> None:
    model = tiny_model("phi3", rope_parameters={"rope_theta": 5e4, "partial_rotary_factor": 0.5})
    (rope,) = anatomy_of(model).ropes
    assert (rope.theta, rope.rotary_dims, rope.scaling) == (5e4, 8, "default")


@pytest.mark.parametrize(
    ("scaling", "depends", "factor"),
    [
        ({"rope_type": "linear", "factor": 2.0}, False, 1.0),
        ({"rope_type": "dynamic", "factor": 2.0}, True, 1.0),
        ({"rope_type": "yarn", "factor": 4.0}, False, 1.1386294361119891),
    ],
)
def test_scaled_rope(scaling: dict[str, object], factor: float, *, depends: bool) -> None:
    model = tiny_model(
        "llama",
        rope_parameters={"rope_theta": 1e4, "original_max_position_embeddings": 512, **scaling},
    )
    (rope,) = anatomy_of(model).ropes
    assert rope.scaling == scaling["rope_type"]
    assert rope.depends_on_length == depends
    assert rope.attention_scaling == pytest.approx(factor)


def test_declared_nope_layers() -> None:
    anatomy = anatomy_of(tiny_model("smollm3"))
    assert [layer.rope for layer in anatomy.layers] == ["rope", "rope", "rope", "nope"]
    assert anatomy.rope_of(3) is None


def test_score_facts() -> None:
    gemma = anatomy_of(tiny_model("gemma2"))
    assert (gemma.attention_softcap, gemma.logit_softcap) == (50.0, 30.0)
    assert gemma.query_scale == 256**-0.5
    assert anatomy_of(tiny_model("granite", attention_multiplier=0.5)).query_scale == 0.5
    assert anatomy_of(tiny_model("llama")).attention_softcap is None


@pytest.mark.parametrize("kind", SUPPORTED)
def test_the_meta_device_gives_the_same_anatomy(kind: str) -> None:
    model = tiny_model(kind)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    assert anatomy_of(skeleton) == anatomy_of(model)


def test_to_dict_is_plain() -> None:
    facts = json.loads(json.dumps(anatomy_of(tiny_model("gemma3")).to_dict()))
    assert facts["kv_bytes_per_token"] == 256
    assert facts["layers"][5]["heads"]["kv_heads"] == 2
    assert [rope["theta"] for rope in facts["ropes"]] == [1e6, 1e4]


def test_anatomy_is_unchanged_by_a_forward() -> None:
    model = tiny_model(
        "llama", rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}
    )
    before = anatomy_of(model)
    with torch.no_grad():
        model(tiny_ids(1, 9))
    assert anatomy_of(model) == before
    assert text_config(model) is model.config
