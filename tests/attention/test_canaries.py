"""What kvfold counts on in transformers: these fail first when it changes."""

import inspect

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvfold.cache import CACHE_KEYWORD
from tests.tiny import tiny_ids, tiny_model

VERSION = Version(transformers.__version__)
HANDS_KEYWORDS_OVER = Version("5.24") <= VERSION


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_signatures():
    assert parameters(DynamicLayer.update)[:3] == ["self", "key_states", "value_states"]
    assert parameters(Cache.update)[:4] == ["self", "key_states", "value_states", "layer_idx"]
    assert parameters(CacheLayerMixin.get_mask_sizes) == ["self", "query_length"]
    assert parameters(DynamicLayer.crop)[0] == "self"
    assert len(parameters(DynamicLayer.crop)) == 2
    assert set(parameters(sdpa_mask)) >= {
        "batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function",
        "attention_mask",
    }  # fmt: skip


def test_the_cache_keyword_is_the_models_own():
    names = parameters(tiny_model().forward)
    assert CACHE_KEYWORD in names
    assert ("cache" in names) == HANDS_KEYWORDS_OVER


def test_a_plain_layer_is_exactly_a_dynamic_layer():
    layers = DynamicCache(config=tiny_model("gemma3").config).layers
    assert [type(layer) is DynamicLayer for layer in layers] == [False] * 5 + [True]


class Recorder(DynamicLayer):
    """Notes what it is asked, in order."""

    def __init__(self, calls: list[tuple[str, object]]) -> None:
        super().__init__()
        self.calls = calls

    def update(self, key_states, value_states, *args, **kwargs):
        self.calls.append(("update", kwargs.get("kwargs")))
        if isinstance(kwargs.get("kwargs"), dict):
            kwargs["kwargs"]["kvfold_probe"] = id(self)
        return super().update(key_states, value_states, *args, **kwargs)

    def get_mask_sizes(self, query_length):
        self.calls.append(("get_mask_sizes", query_length))
        return super().get_mask_sizes(query_length)


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> list[tuple[str, object]]:
    """The calls of a prompt of 9 tokens and one more, in a model of one layer."""
    calls: list[tuple[str, object]] = []

    def attention(module, query, key, value, attention_mask, **options):
        calls.append(("attention", options))
        assert attention_mask == "mask"
        return sdpa_attention_forward(module, query, key, value, None, **options)

    def mask(**options):
        calls.append(("mask", options))
        return "mask"

    AttentionInterface.register("kvfold-canary", attention)
    AttentionMaskInterface.register("kvfold-canary", mask)
    model = tiny_model(num_hidden_layers=1)
    model.set_attn_implementation("kvfold-canary")
    held = DynamicCache(config=model.config)
    held.layers = [Recorder(calls)]
    with torch.no_grad():
        model(tiny_ids(1, 9), **{CACHE_KEYWORD: held})
        model(tiny_ids(1, 1), **{CACHE_KEYWORD: held})
    return calls


def test_mask_sizes_are_asked_before_the_update_and_attention_comes_last(
    recorded: list[tuple[str, object]],
):
    names = [name for name, _ in recorded]
    assert names == ["get_mask_sizes", "mask", "update", "attention"] * 2


def test_the_update_hands_its_keywords_to_attention(recorded: list[tuple[str, object]]):
    options = [given for name, given in recorded if name == "attention"]
    if HANDS_KEYWORDS_OVER:
        assert all("kvfold_probe" in given for given in options)
    else:
        assert all("kvfold_probe" not in given for given in options)


def test_the_mask_function_is_given_numbers_and_a_rule_over_columns(
    recorded: list[tuple[str, object]],
):
    masks = [given for name, given in recorded if name == "mask"]
    assert [int(given["q_offset"]) for given in masks] == [0, 9]
    assert [given["q_length"] for given in masks] == [9, 1]
    assert [given["kv_length"] for given in masks] == [9, 10]
    rule = masks[1]["mask_function"]
    query, keys = torch.tensor([[[[4]]]]), torch.tensor([[[[2, 4, 6]]]])
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    assert rule(zero, zero, query, keys).tolist() == [[[[True, True, False]]]]


def test_generate_cuts_a_later_turn_by_the_logical_length():
    model, ids = tiny_model(num_hidden_layers=1), tiny_ids(1, 30)
    held = DynamicCache(config=model.config)
    lengths: list[int] = []
    hook = model.base_model.register_forward_pre_hook(
        lambda module, arguments, keywords: lengths.append(keywords["input_ids"].shape[1]),
        with_kwargs=True,
    )
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 1, CACHE_KEYWORD: held}
    model.generate(ids[:, :20], attention_mask=torch.ones(1, 20), **options)
    model.generate(ids, attention_mask=torch.ones(1, 30), **options)
    hook.remove()
    assert lengths == [20, 10]
