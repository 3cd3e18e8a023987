"""Turns, beams, several answers and speculation, through `generate`."""

import pytest
import torch
from transformers import PreTrainedModel

import kvfold
from kvfold.cache import CACHE_KEYWORD, KVCache
from kvfold.errors import ConfigError
from tests.contract import BASIC, assert_close, attached, left_padded, teacher_forced
from tests.tiny import tiny_ids

METHODS = ["full", *(name for name, _ in BASIC)]


def fresh(method: str, budget: float | int = 0.4) -> KVCache:
    return kvfold.make_cache(attached(), method, budget=None if method == "full" else budget)


def generate(ids: torch.Tensor, held: KVCache, count: int = 10, **options: object) -> torch.Tensor:
    """All tokens `[B, T + count]`, greedy unless the options say otherwise."""
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, **options}
    model: PreTrainedModel = attached()
    return model.generate(
        ids, max_new_tokens=count, eos_token_id=None, **{CACHE_KEYWORD: held}, **options
    )


def two_turns(method: str, how: str, pads: list[int] | None = None) -> list[list[int]]:
    """The second answer, the second turn given in one of three ways."""
    first, second = tiny_ids(2, 40), tiny_ids(2, 9, seed=1)
    mask = left_padded(pads or [40, 40], 40)
    held = fresh(method)
    sofar = torch.cat([generate(first, held, attention_mask=mask), second], dim=1)
    mask = torch.cat([mask, mask.new_ones(2, 19)], dim=1)
    seen = held.get_seq_length()
    assert seen == 49  # the last token of the answer was never run
    if how == "all":
        return generate(sofar, held, attention_mask=mask)[:, 59:].tolist()
    if how == "new":
        return generate(sofar[:, seen:], held, attention_mask=mask)[:, 10:].tolist()
    logits, tokens = kvfold.prefill(attached(), sofar[:, seen:], held, attention_mask=mask), []
    for _ in range(10):
        tokens.append(logits.argmax(-1))
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        logits = kvfold.prefill(attached(), tokens[-1][:, None], held, attention_mask=mask)
    return torch.stack(tokens, dim=1).tolist()


@pytest.mark.parametrize("pads", [None, [40, 25]], ids=["plain", "padded"])
@pytest.mark.parametrize("method", METHODS)
def test_a_second_turn_three_ways(method: str, pads: list[int] | None):
    expected = two_turns(method, "loop", pads)
    assert two_turns(method, "all", pads) == expected
    assert two_turns(method, "new", pads) == expected


@pytest.mark.parametrize("method", METHODS)
def test_generate_equals_the_loop(method: str):
    ids = tiny_ids(2, 40)
    mask = left_padded([40, 31], 40)
    tokens = generate(ids, fresh(method), attention_mask=mask)[:, 40:]
    logits = teacher_forced(attached(), fresh(method), ids, tokens[:, :-1], mask=mask)
    assert logits.argmax(-1).tolist() == tokens.tolist()


def test_beams_without_eviction_equal_beams_without_kvfold():
    ids = tiny_ids(2, 40)
    expected = attached().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=10,
        num_beams=3,
        eos_token_id=None,
        do_sample=False,
    )
    assert torch.equal(generate(ids, fresh("full"), num_beams=3), expected)


@pytest.mark.parametrize("method", METHODS)
def test_beams_and_several_answers(method: str):
    ids, held = tiny_ids(2, 40), fresh(method, 16)
    assert generate(ids, held, num_beams=3).shape == (2, 50)
    report = held.report()
    assert (report.rows, report.tokens_seen) == (6, 49)
    assert max(report.tokens_kept) == (49 if method == "full" else 16)
    held = fresh(method, 16)
    several = generate(ids, held, do_sample=True, num_return_sequences=2)
    assert several.shape == (4, 50)
    assert held.report().rows == 4


def test_speculation_without_eviction_equals_greedy():
    ids = tiny_ids(1, 12).repeat(1, 5)
    plain = generate(ids, fresh("full"), 30)
    assert torch.equal(generate(ids, fresh("full"), 30, prompt_lookup_num_tokens=4), plain)


@pytest.mark.parametrize("method", [name for name, _ in BASIC])
def test_speculation_with_eviction_is_refused(method: str):
    ids = tiny_ids(1, 12).repeat(1, 5)
    with pytest.raises((ConfigError, ValueError), match=r"crop|evict|roll"):
        generate(ids, fresh(method), 30, prompt_lookup_num_tokens=4)


@pytest.mark.parametrize("method", [name for name, _ in BASIC])
def test_crop_after_eviction_is_refused(method: str):
    held = fresh(method, 16)
    kvfold.prefill(attached(), tiny_ids(2, 40), held)
    with pytest.raises(ConfigError, match="evicted or repacked tokens, so none can be taken back"):
        held.crop(-3)
    assert held.get_seq_length() == 40


@pytest.mark.parametrize(
    ("method", "pads"),
    [(name, [30, 30]) for name in ("full", "streaming", "knorm", "random")] + [("full", [30, 12])],
)
def test_crop_before_eviction_takes_tokens_back(method: str, pads: list[int]):
    model, ids, follow = attached(), tiny_ids(2, 30), tiny_ids(2, 25, seed=1)
    mask = left_padded(pads, 30)
    expected = teacher_forced(model, fresh(method, 40), ids, follow, mask=mask)
    held = fresh(method, 40)
    teacher_forced(model, held, ids, tiny_ids(2, 6, seed=2), mask=mask)
    held.crop(-6)
    assert held.get_seq_length() == 30
    longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    actual = teacher_forced(model, held, follow[:, :1], follow[:, 1:], mask=longer)
    assert_close(actual, expected[:, 1:])


def test_crop_across_padding_between_turns():
    model, first, second = attached(), tiny_ids(2, 20), tiny_ids(2, 8, seed=1)
    mask = torch.cat([left_padded([20, 20], 20), left_padded([8, 3], 8)], dim=1)
    held = fresh("full")
    kvfold.prefill(model, first, held, attention_mask=mask[:, :20])
    expected = kvfold.prefill(model, second, held, attention_mask=mask)
    held.crop(-8)
    assert_close(kvfold.prefill(model, second, held, attention_mask=mask), expected)


def test_crop_takes_a_length_only_as_a_negative_number():
    held = fresh("full")
    kvfold.prefill(attached(), tiny_ids(1, 10), held)
    with pytest.raises(ConfigError, match="negative number"):
        held.crop(5)
    held.crop(0)
    assert held.get_seq_length() == 10
    held.crop(-99)
    assert held.get_seq_length() == 0


def test_a_turn_after_padding_needs_the_mask_of_all_turns():
    held = fresh("full")
    mask = left_padded([12, 5], 12)
    kvfold.prefill(attached(), tiny_ids(2, 12), held, attention_mask=mask)
    for wrong in (None, torch.ones(2, 15, dtype=torch.long)):
        with pytest.raises(ConfigError, match="pass the mask over all turns"):
            kvfold.prefill(attached(), tiny_ids(2, 3), held.fork(), attention_mask=wrong)
    whole = torch.cat([mask, mask.new_ones(2, 3)], dim=1)
    kvfold.prefill(attached(), tiny_ids(2, 3), held, attention_mask=whole)
    assert held.own_layers[0].lengths.tolist() == [15, 8]


def test_a_mask_that_hides_what_was_stored_is_refused():
    held = fresh("full")
    kvfold.prefill(attached(), tiny_ids(1, 12), held)
    hiding = torch.ones(1, 15, dtype=torch.long)
    hiding[0, 4] = 0
    with pytest.raises(ConfigError, match="pass the mask over all turns"):
        kvfold.prefill(attached(), tiny_ids(1, 3), held, attention_mask=hiding)


@pytest.mark.parametrize("method", ["full", "h2o"])
def test_cropped_to_nothing_is_as_new(method: str):
    held = fresh(method, 64)
    kvfold.prefill(attached(), tiny_ids(2, 12), held, attention_mask=left_padded([12, 5], 12))
    if method == "full":
        held.crop(-12)
    else:
        held.reset()
    other = tiny_ids(2, 20, seed=9)
    expected = kvfold.prefill(attached(), other, fresh(method, 64))
    assert torch.equal(kvfold.prefill(attached(), other, held), expected)


@pytest.mark.parametrize("method", ["full", "h2o"])
def test_right_padding_is_refused(method: str):
    mask = left_padded([12, 5], 12).flip(1)
    with pytest.raises(ConfigError, match="pad on the left"):
        kvfold.prefill(attached(), tiny_ids(2, 12), fresh(method), attention_mask=mask)
