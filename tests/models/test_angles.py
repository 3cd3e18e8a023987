"""Un-rotated by a layer's angles, its cached keys are the keys before RoPE."""

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cohere2Config, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvfold.cache import CACHE_KEYWORD
from kvfold.models import (
    angles,
    attention_module,
    head_shape,
    key_norm,
    key_weight,
    probe_rope,
    projection_bias,
    rotary,
)
from kvfold.ops.rotary import rotate, unrotate
from tests.tiny import SHARED, SUPPORTED, tiny_ids, tiny_model

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [30, 31, 40, 41, 42, 43, 44, 45, 900]])


def cached_and_raw(model: PreTrainedModel) -> list[tuple[Tensor, Tensor]]:
    """Each layer's cached keys and its keys before RoPE, computed anew from its input."""
    inputs: dict[int, Tensor] = {}
    handles = []
    count = model.config.num_hidden_layers
    for index in range(count):

        def record(module: nn.Module, args: object, kwargs: dict, index: int = index) -> None:
            inputs[index] = kwargs["hidden_states"]

        attention = attention_module(model, index)
        handles.append(attention.register_forward_pre_hook(record, with_kwargs=True))
    cache = DynamicCache()
    with torch.no_grad():
        model(
            tiny_ids(*POSITIONS.shape),
            position_ids=POSITIONS,
            use_cache=True,
            **{CACHE_KEYWORD: cache},
        )
        raw = [raw_keys(model, index, inputs[index]) for index in range(count)]
    for handle in handles:
        handle.remove()
    cached = [layer.keys for layer in cache.layers if isinstance(layer, DynamicLayer)]
    return [(keys, key) for keys, key in zip(cached, raw, strict=True) if keys is not None]


def raw_keys(model: PreTrainedModel, index: int, hidden: Tensor) -> Tensor:
    """Keys `[B, G, T, D]` before RoPE, of hidden states `[B, T, M]`."""
    shape, norm = head_shape(model, index), key_norm(model, index)
    flat = nn.functional.linear(
        hidden, key_weight(model, index), projection_bias(model, index, "key")
    )
    weight = getattr(norm, "weight", None)
    if norm is not None and weight is not None and weight.numel() == flat.shape[-1]:
        return norm(flat).unflatten(-1, (shape.kv_heads, shape.head_dim)).transpose(1, 2)
    heads = flat.unflatten(-1, (shape.kv_heads, shape.head_dim)).transpose(1, 2)
    return heads if norm is None else norm(heads)


def assert_angles_fit(model: PreTrainedModel, findings: list[str]) -> None:
    """Un-rotated keys are the raw ones and rotated raw ones the cached, in every layer."""
    pairs = cached_and_raw(model)
    assert probe_rope(model) == findings
    for index, ((cached, raw), finding) in enumerate(zip(pairs, findings, strict=True)):
        if finding == "nope":
            torch.testing.assert_close(cached, raw, rtol=1e-5, atol=1e-5)
            continue
        found = angles(model, index, POSITIONS)
        assert found is not None
        assert {angle.dtype for angle in found} == {torch.float32}
        assert {angle.shape[:3] for angle in found} == {(2, 1, 9)}
        interleaved = finding == "interleaved"
        # Angles of position 900 are rounded to 6e-5 where they are multiplied in float32.
        back = unrotate(cached, *found, interleaved=interleaved)
        torch.testing.assert_close(back, raw, rtol=1e-3, atol=1e-3)
        again = rotate(raw, *found, interleaved=interleaved)
        torch.testing.assert_close(again, cached, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_family(kind: str) -> None:
    model = tiny_model(kind)
    expected = ["rope"] * model.config.num_hidden_layers
    if kind == "smollm3":
        expected[3] = "nope"
        assert angles(model, 3, POSITIONS) is None
    assert_angles_fit(model, expected)


def test_neighbouring_pairs_and_nope_that_is_not_declared() -> None:
    config = Cohere2Config(**{**SHARED, "num_hidden_layers": 4, "sliding_window": 24})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert_angles_fit(model, ["interleaved", "interleaved", "interleaved", "nope"])


@pytest.mark.parametrize(
    ("kind", "rope", "dims"),
    [
        ("llama", {"rope_type": "linear", "factor": 3.0}, 16),
        (
            "llama",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            16,
        ),
        ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}, 8),
    ],
)
def test_scaled_and_partial_rope(kind: str, rope: dict[str, object], dims: int) -> None:
    model = tiny_model(kind, rope_parameters={"rope_theta": 1e4, **rope})
    assert_angles_fit(model, ["rope"] * 3)
    found = angles(model, 0, POSITIONS)
    assert found is not None
    assert [angle.shape[-1] for angle in found] == [dims, dims]


def test_two_sets_of_frequencies() -> None:
    model = tiny_model("gemma3")
    kinds = model.config.layer_types
    sliding, full = (
        angles(model, kinds.index(kind), POSITIONS)
        for kind in ("sliding_attention", "full_attention")
    )
    assert sliding is not None
    assert full is not None
    slowest = {"sliding": 1e4 ** (-14 / 16), "full": 1e6 ** (-14 / 16)}
    assert float(sliding[1][1, 0, 8, 7]) == pytest.approx(math.sin(900 * slowest["sliding"]))
    assert float(full[1][1, 0, 8, 7]) == pytest.approx(math.sin(900 * slowest["full"]))


def test_a_model_in_half_precision_has_angles_in_full() -> None:
    model = tiny_model("llama").bfloat16()
    found = angles(model, 0, POSITIONS)
    assert found is not None
    frequencies = dict(rotary(model).named_buffers())["inv_freq"].float()
    phases = POSITIONS[:, None, :, None] * frequencies.repeat(2)
    torch.testing.assert_close(found, (phases.cos(), phases.sin()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("output", ["pairs", "complex"])
def test_other_forms(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    expected = angles(model, 0, POSITIONS)
    assert expected is not None
    plain = rotary(model).forward

    def forward(x: Tensor, position_ids: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        cosines, sines = (angle.chunk(2, -1)[0] for angle in plain(x, position_ids))
        return (cosines, sines) if output == "pairs" else torch.complex(cosines, sines)

    monkeypatch.setattr(rotary(model), "forward", forward)
    found = angles(model, 0, POSITIONS)
    if output == "complex":
        assert found is None
    else:
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
