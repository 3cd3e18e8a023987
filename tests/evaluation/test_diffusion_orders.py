"""Generation settings of lm-evaluation-harness in the words of diffusion, without lm-eval."""

from __future__ import annotations

from typing import Any

import pytest

from kvfold.diffusion import DreamSampler, LLaDASampler
from kvfold.errors import ConfigError
from kvfold.evaluation.diffusion_orders import order_batches, read_order

OWN = LLaDASampler(block_length=8, threshold=0.9, temperature=0.5)


def test_what_the_task_does_not_say_is_as_the_model_was_made() -> None:
    order = read_order({}, 48, OWN)
    assert (order.length, order.until, order.sampler) == (48, (), OWN)


@pytest.mark.parametrize("name", ["max_gen_toks", "max_new_tokens", "max_tokens"])
def test_the_task_says_how_long(name: str) -> None:
    assert read_order({name: 12}, 48, OWN).length == 12
    assert read_order({name: None}, 48, OWN).length == 48


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, 0.0),
        ({"temperature": 0, "top_k": 5}, 0.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": True, "temperature": 0.2}, 0.2),
        ({"do_sample": True}, 0.5),
    ],
)
def test_the_task_says_how_much_chance(given: dict[str, Any], temperature: float) -> None:
    assert read_order(given, 8, OWN).sampler.temperature == temperature


def test_options_of_the_sampler_can_be_given_with_the_task() -> None:
    given = {"do_sample": True, "top_p": 0.9, "steps": 4}
    sampler = read_order(given, 8, DreamSampler()).sampler
    assert sampler == DreamSampler(temperature=1.0, top_p=0.9, steps=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 4}, "num_beams=4, which this sampler has not"),
        ({"do_sample": True, "top_p": 0.9}, "top_p=0.9"),
        ({"max_gen_toks": "many"}, "max_gen_toks is 'many'"),
        ({"until": 3}, "until is 3"),
        ({"temperature": -1}, "temperature is -1"),
    ],
)
def test_what_diffusion_cannot_do_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_order(given, 8, OWN)


@pytest.mark.parametrize(
    ("until", "left"),
    [("b", "a"), (["c", "b"], "a"), (["", "c"], "ab"), (None, "abcb"), (["z"], "abcb")],
)
def test_a_text_ends_before_the_first_stop_string(until: Any, left: str) -> None:
    assert read_order({"until": until}, 8, OWN).cut("abcb") == left


def test_batches_share_their_settings() -> None:
    one, two = {"until": ["."]}, {"until": ["."], "temperature": 0.5}
    requests = [([0] * length, given) for length in (1, 4, 2, 3) for given in (one, two)]
    found = list(order_batches(requests, 3))
    assert found == [[2, 6, 4], [0], [3, 7, 5], [1]]
