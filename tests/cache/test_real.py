"""On the default model: a full cache says what transformers' own says, over 256 greedy tokens."""

from __future__ import annotations

import pydoc_data.topics

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import kvfold
from kvfold.cache import CACHE_KEYWORD, KVCache

pytestmark = pytest.mark.real
TOKENS = 256
QUESTIONS = ("In short, what does this say?", "Give an example of it.", "And when is it of no use?")


@pytest.fixture
def model(default_model: tuple[PreTrainedModel, object]) -> PreTrainedModel:
    return default_model[0]


@pytest.fixture
def prompts(default_model: tuple[PreTrainedModel, object]) -> dict[str, torch.Tensor]:
    """Three passages of unequal length, padded on the left."""
    topics = pydoc_data.topics.topics
    texts = [topics[name][:length] for name, length in
             [("assignment", 600), ("while", 420), ("integers", 300)]]  # fmt: skip
    tokenizer = default_model[1]
    tokenizer.padding_side = "left"
    return dict(tokenizer(texts, return_tensors="pt", padding=True))


def own(model: PreTrainedModel) -> DynamicCache:
    """The cache that transformers would use."""
    return DynamicCache(config=model.config)


def answer(
    model: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    held: KVCache | DynamicCache,
    count: int = TOKENS,
    **options: object,
) -> torch.Tensor:
    """Greedy tokens `[B, count]`."""
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False,
        **{CACHE_KEYWORD: held}, **options,
    )  # fmt: skip
    return output[:, ids.shape[1] :]


def by_transformers(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **options: object
) -> torch.Tensor:
    """The same with transformers' own attention and cache."""
    model.set_attn_implementation("sdpa")
    try:
        return answer(model, ids, mask, own(model), **options)
    finally:
        model.set_attn_implementation("kvfold")


def test_single(model: PreTrainedModel, prompts: dict[str, torch.Tensor]):
    ids, mask = (prompts[name][:1] for name in ("input_ids", "attention_mask"))
    assert bool(mask.all())
    expected = by_transformers(model, ids, mask)
    actual = answer(model, ids, mask, kvfold.make_cache(model, "full"))
    assert actual.tolist() == expected.tolist()


@pytest.mark.parametrize("count", [48, pytest.param(TOKENS, marks=pytest.mark.slow)])
def test_left_padded_batch(model: PreTrainedModel, prompts: dict[str, torch.Tensor], count: int):
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    assert not bool(mask[1:].all(-1).any())
    expected = by_transformers(model, ids, mask, count=count)
    actual = answer(model, ids, mask, kvfold.make_cache(model, "full"), count)
    assert actual.tolist() == expected.tolist()


@pytest.mark.slow
def test_chunked_prefill(model: PreTrainedModel, prompts: dict[str, torch.Tensor]):
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    expected = by_transformers(model, ids, mask)
    full = kvfold.make_cache(model, "full")
    actual = answer(model, ids, mask, full, prefill_chunk_size=37)
    assert actual.tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_three_turns(
    model: PreTrainedModel,
    default_model: tuple[PreTrainedModel, object],
    prompts: dict[str, torch.Tensor],
    rows: int,
):
    """86 tokens a turn: 258 in all."""
    said: list[list[list[int]]] = []
    for mine in (True, False):
        ids, mask = (prompts[name][:rows] for name in ("input_ids", "attention_mask"))
        held = kvfold.make_cache(model, "full") if mine else own(model)
        if not mine:
            model.set_attn_implementation("sdpa")
        try:
            for question in QUESTIONS:
                asked = default_model[1]([question] * rows, return_tensors="pt")["input_ids"]
                ids = torch.cat([ids, asked], dim=1)
                mask = torch.cat([mask, mask.new_ones(asked.shape)], dim=1)
                reply = answer(model, ids, mask, held, 86)
                ids = torch.cat([ids, reply], dim=1)
                mask = torch.cat([mask, mask.new_ones(reply.shape)], dim=1)
        finally:
            model.set_attn_implementation("kvfold")
        said.append(ids.tolist())
    assert said[0] == said[1]
