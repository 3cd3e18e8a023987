"""On the default model: a needle in a thousand tokens of prose is found where eviction loses it."""

from __future__ import annotations

import pydoc_data.topics
import re

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.cache import CACHE_KEYWORD, KVCache

pytestmark = pytest.mark.real
NEEDLE = " The secret number of the old lighthouse is 48213."
QUESTION = (
    "<|im_end|>\n<|im_start|>user\nWhat is the secret number of the old lighthouse?<|im_end|>\n"
    "<|im_start|>assistant\nThe secret number of the old lighthouse is"
)
TOKENS = 1000

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def prompts(tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, torch.Tensor]:
    """The prose with the needle a third in, and the question, which is asked afterwards."""
    topics = pydoc_data.topics.topics
    prose = re.sub(r"\s+", " ", "".join(topics[name] for name in ("with", "while", "assignment")))
    words = tokenizer(prose)["input_ids"][:TOKENS]
    needle = tokenizer(NEEDLE)["input_ids"]
    start = tokenizer("<|im_start|>user\n")["input_ids"]
    third = len(words) // 3
    ids = [*start, *words[:third], *needle, *words[third:]]
    return torch.tensor([ids]), torch.tensor([tokenizer(QUESTION)["input_ids"]])


def answer(loaded: Loaded, held: KVCache) -> str:
    model, tokenizer = loaded
    ids, question = prompts(tokenizer)
    kvfold.prefill(model, ids, held)
    ids = torch.cat([ids, question], dim=1)
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
        **{CACHE_KEYWORD: held},
    )  # fmt: skip
    return tokenizer.decode(output[0, ids.shape[1] :])


def test_a_needle_is_found_at_a_quarter(default_model: Loaded):
    held = kvfold.make_cache(default_model[0], "sekv", budget=0.25)
    assert "48213" in answer(default_model, held)
    report = held.report()
    assert report.tokens_seen > TOKENS
    assert report.share <= 0.25
    assert report.bytes_slow <= report.bytes_full


def test_it_is_lost_where_old_tokens_are_evicted(default_model: Loaded):
    held = kvfold.make_cache(default_model[0], "streaming", budget=0.25)
    assert "48213" not in answer(default_model, held)
