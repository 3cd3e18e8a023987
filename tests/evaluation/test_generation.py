"""Decoding token by token: greedy, sampled, stopped, and turned into text."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.cache import prefill
from kvfold.errors import ConfigError
from kvfold.evaluation.generation import Sampler, TextStream, generate, sampler, stop_tokens
from kvfold.text import encode
from tests.tiny import tiny_ids, tiny_model
from tests.tiny_folder import byte_tokenizer


def answer(
    count: int, *, stop: frozenset[int] = frozenset(), choose: Sampler | None = None
) -> list[int]:
    model, ids = tiny_model(), tiny_ids(1, 20)
    with kvfold.attach(model):
        cache = kvfold.make_cache(model, "full")
        logits = prefill(model, ids, cache)
        chosen = generate(model, cache, logits, max_new_tokens=count, stop=stop, choose=choose)
        return list(chosen)


def test_greedy_equals_recomputing_the_whole_text() -> None:
    model, ids = tiny_model(), tiny_ids(1, 20)
    expected = []
    with torch.no_grad():
        for _ in range(12):
            expected.append(int(model(ids).logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([expected[-1:]])], dim=1)
    assert answer(12) == expected


def test_a_stop_token_ends_the_answer_and_is_not_in_it() -> None:
    whole = answer(12)
    stop = whole[5]
    assert answer(12, stop=frozenset([stop])) == whole[: whole.index(stop)]


def test_sampling_is_settled_by_the_seed() -> None:
    drawn = [answer(12, choose=sampler(5.0, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(20_000, 1)
    drawn = sampler(2.0, seed=0)(logits)
    shares = torch.bincount(drawn, minlength=3) / len(drawn)
    assert torch.allclose(shares, torch.softmax(logits[0] / 2, dim=0), atol=0.02)


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_impossible_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        sampler(temperature)


def test_stop_tokens_come_from_model_and_tokenizer() -> None:
    model = tiny_model()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [7, 9]
    assert stop_tokens(model, byte_tokenizer()) == {2, 7, 9}


def test_characters_are_shown_whole() -> None:
    tokenizer = byte_tokenizer()
    text = "né 😀 日本\nend"
    stream = TextStream(tokenizer)
    parts = [stream.feed(token) for token in encode(tokenizer, text)]
    assert len(parts) > len(text)
    assert {part for part in parts if part} <= set(text)
    assert "".join([*parts, stream.finish()]) == text == stream.text


def test_a_broken_character_is_shown_in_the_end() -> None:
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer)
    shown = [stream.feed(token) for token in encode(tokenizer, "a😀")[:-1]]
    assert "".join(shown) == "a"
    assert stream.finish() == "\ufffd"
