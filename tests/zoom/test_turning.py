"""Keys turned to the first position of their span are those before RoPE, but for one turn."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, Cohere2Config, DynamicCache, PreTrainedModel

from kvfold.cache import CACHE_KEYWORD
from kvfold.errors import UnsupportedModelError
from kvfold.models import angles, probe_rope
from kvfold.ops.rotary import unrotate
from kvfold.zoom import turning
from kvfold.zoom.turning import turnings
from tests.contract import assert_close
from tests.tiny import SHARED, tiny_ids, tiny_model

FIRST, COUNT = 37, 12
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def interleaved() -> PreTrainedModel:
    """Two layers of four slide, one is interleaved, one has no RoPE."""
    config = Cohere2Config(**{**SHARED, "num_hidden_layers": 4, "sliding_window": 24})
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


MODELS = {
    "llama": lambda: tiny_model("llama"),
    "qwen3": lambda: tiny_model("qwen3"),
    "gemma3": lambda: tiny_model("gemma3"),
    "no rope in some": lambda: tiny_model("smollm3"),
    "partial": lambda: tiny_model(
        "phi3", rope_parameters={"rope_theta": 5e4, "partial_rotary_factor": 0.5}
    ),
    "scaled": lambda: tiny_model("llama", rope_parameters=YARN),
    "interleaved": interleaved,
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_products_of_keys_are_those_before_rope(name: str):
    model = MODELS[name]()
    ids, cache = tiny_ids(1, FIRST + COUNT), DynamicCache(config=model.config)
    model(input_ids=ids, **{CACHE_KEYWORD: cache})
    found, findings = turnings(model, COUNT), probe_rope(model)
    full = [index for index, layer in enumerate(cache.layers) if not layer.is_sliding]
    assert len(found) == len(full) > 0
    for index, turned in zip(full, found, strict=True):
        keys = cache.layers[index].keys[:, :, FIRST:]
        assert (turned is None) == (findings[index] == "nope")
        if turned is None:
            continue
        at = angles(model, index, torch.arange(FIRST, FIRST + COUNT)[None])
        plain = unrotate(keys, *at, interleaved=findings[index] == "interleaved")
        back = turned.back(keys)
        assert_close(back @ back.mT, plain @ plain.mT, 1e-4)
        assert (back @ back.mT - keys @ keys.mT).norm() > 0.1 * keys.norm()
        assert_close(turned.forth(back), keys)


def test_what_cannot_be_turned_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(turning, "probe_rope", lambda model: ["rope", "unknown", "rope"])
    with pytest.raises(UnsupportedModelError, match=r"keys of layer 1 of Llama.*leave factors out"):
        turnings(tiny_model("llama"), 8)


def test_no_model_is_kept_alive():
    model = tiny_model("llama")
    known, held = weakref.ref(model), turnings(model, 8)
    del model
    gc.collect()
    assert known() is None
    assert len(held) == 3
