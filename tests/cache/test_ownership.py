"""A cache serves the model it was made for, and prompts that begin with what it has seen."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.cache import CACHE_KEYWORD, KVCache
from kvfold.errors import ConfigError
from tests.contract import attached, left_padded
from tests.tiny import tiny_ids, tiny_model

ANOTHER = "made for another model"


def new_model(kind: str = "llama", **options: int) -> PreTrainedModel:
    model = tiny_model(kind, **options)
    kvfold.attach(model)
    return model


def filled(model: PreTrainedModel) -> KVCache:
    held = kvfold.make_cache(model, "h2o", budget=16)
    kvfold.prefill(model, tiny_ids(1, 30), held)
    return held


def step(model: torch.nn.Module, held: KVCache) -> None:
    with torch.no_grad():
        model(input_ids=tiny_ids(1, 1), **{CACHE_KEYWORD: held})


class Tuner(torch.nn.Module):
    """Holds a model as PEFT's tuners do: what is missing here is looked up in the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["model"], name)

    def forward(self, **arguments: object) -> object:
        return self.model.forward(**arguments)


class Wrapper(torch.nn.Module):
    """Wraps a tuner as PEFT's models do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = Tuner(model)

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["base_model"], name)

    def forward(self, **arguments: object) -> object:
        return self.base_model(**arguments)


@pytest.mark.parametrize("other", [{"seed": 1}, {"num_hidden_layers": 2}], ids=str)
def test_another_model_is_refused_and_nothing_is_stored(other: dict[str, int]):
    mine, another = new_model(), new_model(**other)
    held = filled(mine)
    with pytest.raises(ConfigError, match=ANOTHER):
        step(another, held)
    with pytest.raises(ConfigError, match=ANOTHER):
        another.generate(tiny_ids(1, 40), max_new_tokens=2, **{CACHE_KEYWORD: held})
    assert held.get_seq_length() == 30
    step(mine, held)
    assert held.get_seq_length() == 31


def test_an_empty_cache_of_a_living_model_is_refused_too():
    mine, another = new_model(), new_model(seed=1)
    with pytest.raises(ConfigError, match=ANOTHER):
        step(another, kvfold.make_cache(mine, "full"))


@pytest.mark.parametrize("derive", [copy.deepcopy, KVCache.fork], ids=["deepcopy", "fork"])
def test_copies_belong_to_the_same_model(derive: Callable[[KVCache], KVCache]):
    mine, another = new_model(), new_model(seed=1)
    held = derive(filled(mine))
    step(mine, held)
    with pytest.raises(ConfigError, match=ANOTHER):
        step(another, held)


def test_a_loaded_cache_belongs_to_the_model_it_was_loaded_for(tmp_path: Path):
    mine, same_weights = new_model(), new_model()
    held = filled(mine)
    with pytest.raises(ConfigError, match=r"carry it over by cache\.save"):
        step(same_weights, held)
    held.save(tmp_path / "cache")
    loaded = kvfold.load_cache(tmp_path / "cache", same_weights)
    step(same_weights, loaded)
    with pytest.raises(ConfigError, match=ANOTHER):
        step(mine, loaded)


def test_attached_twice_or_again():
    model = tiny_model()
    with kvfold.attach(model), kvfold.attach(model):
        held = filled(model)
    with kvfold.attach(model):
        step(model, held)
    assert held.get_seq_length() == 31


def test_a_copy_of_the_model_is_another_model():
    model = new_model()
    twin = copy.deepcopy(model)
    held = filled(model)
    with pytest.raises(ConfigError, match=ANOTHER):
        step(twin, held)
    step(twin, filled(twin))


def test_the_base_model_and_wrappers_are_the_same_model():
    model = new_model()
    wrapped = Wrapper(model)
    for maker in (model, model.base_model, wrapped):
        held = kvfold.make_cache(maker, "h2o", budget=16)
        for runner in (model, model.base_model, wrapped):
            step(runner, held)
        assert held.get_seq_length() == 3


def test_a_wrapper_can_be_attached():
    model = tiny_model()
    with kvfold.attach(Wrapper(model)):
        held = filled(model)
        step(model, held)
        assert held.get_seq_length() == 31
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_the_cache_of_a_model_that_is_gone():
    model = new_model()
    held, empty = filled(model), kvfold.make_cache(model, "h2o", budget=16)
    model = new_model(seed=1)
    gc.collect()
    assert held.model is None
    with pytest.raises(ConfigError, match=ANOTHER):
        step(model, held)
    with pytest.raises(ConfigError, match=ANOTHER):
        step(new_model(num_hidden_layers=2), empty)
    with pytest.raises(ConfigError, match=ANOTHER):
        step(new_model("mistral_window"), empty)
    kvfold.prefill(model, tiny_ids(1, 30), empty)
    assert empty.report().tokens_kept == [16, 16, 16]
    with pytest.raises(ConfigError, match=ANOTHER):
        step(new_model(seed=2), empty)


@pytest.mark.parametrize("method", ["full", "h2o"])
@pytest.mark.parametrize("count", [5, 15, 25])
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_a_prompt_without_the_past_is_refused(method: str, count: int, padded: bool):
    # From 25 tokens that do not contain the 30 before, `generate` cuts the last 20.
    held = kvfold.make_cache(attached(), method)
    mask = left_padded([30, 28 if padded else 30], 30)
    kvfold.prefill(attached(), tiny_ids(2, 30), held, attention_mask=mask)
    question = tiny_ids(2, count, seed=1)
    with pytest.raises(ConfigError, match=r"this prompt does not begin with them|over all"):
        attached().generate(
            question,
            attention_mask=torch.ones_like(question),
            max_new_tokens=3,
            **{CACHE_KEYWORD: held},
        )
    assert held.get_seq_length() == 30


def test_the_message_says_what_to_pass():
    held = filled(attached())
    with pytest.raises(ConfigError, match=r"has seen 30 tokens, .* pass all tokens so far"):
        attached().generate(tiny_ids(1, 5), max_new_tokens=3, **{CACHE_KEYWORD: held})
