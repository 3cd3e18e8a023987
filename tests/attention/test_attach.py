"""A model is switched to kvfold's attention, and given back as it was."""

import pytest
import torch

import kvfold
from kvfold.attention import IMPLEMENTATION, is_attached
from kvfold.cache import CACHE_KEYWORD
from kvfold.errors import ConfigError, UnsupportedModelError
from tests.contract import teacher_forced
from tests.tiny import tiny_ids, tiny_model


def hooks(model: torch.nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(tiny_ids(2, 30)).logits


@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_the_context_restores_the_model(before: str):
    model = tiny_model()
    model.set_attn_implementation(before)
    expected = logits(model)
    with kvfold.attach(model) as same:
        assert same is model
        assert is_attached(model)
        assert hooks(model) == 2
        torch.testing.assert_close(logits(model), expected, rtol=2e-4, atol=2e-4)
    assert model.config._attn_implementation == before
    assert hooks(model) == 0
    assert torch.equal(logits(model), expected)


def test_an_exception_restores_the_model():
    model = tiny_model()
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="halfway"), kvfold.attach(model):
        raise RuntimeError("halfway")
    assert model.config._attn_implementation == before
    assert hooks(model) == 0


def test_nested():
    model = tiny_model()
    before = model.config._attn_implementation
    with kvfold.attach(model):
        with kvfold.attach(model):
            assert is_attached(model)
        assert is_attached(model)
        held = kvfold.make_cache(model, "h2o", budget=16, scope="token")
        kvfold.prefill(model, tiny_ids(1, 30), held)
        assert held.own_layers[0].keys.shape[2] == 16
    assert model.config._attn_implementation == before
    assert hooks(model) == 0


def test_detached_in_any_order():
    model = tiny_model()
    before = model.config._attn_implementation
    outer, inner = kvfold.attach(model), kvfold.attach(model)
    outer.detach()
    inner.detach()
    assert model.config._attn_implementation == before
    assert hooks(model) == 0


def test_detach_twice():
    model = tiny_model()
    attachment = kvfold.attach(model)
    attachment.detach()
    model.set_attn_implementation("eager")
    attachment.detach()
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["falcon", "bloom"])
def test_a_model_with_attention_of_its_own_is_refused_and_left_alone(kind: str):
    model = tiny_model(kind)
    before = model.config._attn_implementation
    expected = logits(model)
    with pytest.raises(UnsupportedModelError, match="kvfold cannot work with it"):
        kvfold.attach(model)
    assert model.config._attn_implementation == before
    assert hooks(model) == 0
    assert torch.equal(logits(model), expected)


def test_a_cache_needs_an_attached_model():
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"call kvfold\.attach\(model\) first"):
        kvfold.make_cache(model, "h2o", budget=16)


@pytest.mark.parametrize("method", ["full", "h2o"])
def test_a_cache_used_after_detaching_says_so(method: str):
    model = tiny_model()
    with kvfold.attach(model):
        held = kvfold.make_cache(model, method, budget=None if method == "full" else 16)
        teacher_forced(model, held, tiny_ids(1, 30), tiny_ids(1, 2))
    with pytest.raises(ConfigError, match="keep the model attached"), torch.no_grad():
        model(tiny_ids(1, 1), **{CACHE_KEYWORD: held})


def test_a_prompt_into_a_cache_of_a_detached_model_says_so():
    model = tiny_model()
    with kvfold.attach(model):
        held = kvfold.make_cache(model, "full")
    with pytest.raises(ConfigError, match="keep the model attached"):
        kvfold.prefill(model, tiny_ids(1, 9), held)


def test_the_weights_and_the_config_are_untouched():
    model = tiny_model()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    with kvfold.attach(model):
        held = kvfold.make_cache(model, "snapkv", budget=16)
        teacher_forced(model, held, tiny_ids(1, 30), tiny_ids(1, 4))
    assert model.config.to_dict() == config
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert IMPLEMENTATION == "kvfold"
