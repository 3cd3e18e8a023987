"""Variable tracking: chains that can be followed, in order, and the variables asked for."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.evaluation.answers import found_share
from kvfold.evaluation.ruler_tracking import EXAMPLE_FROM, draw_tracking, tracking
from kvfold.evaluation.sample import Sample, Wanted
from kvfold.evaluation.samples import SETS, draw_samples
from tests.evaluation.prompts import TOKENIZER, parts

STATEMENT = re.compile(r" VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5})|(\d{5}))\.")


def draw(count: int = 4, *, length: int = 1600, **options: int) -> list[Sample]:
    return draw_samples(TOKENIZER, "ruler-vt", count, length=length, **options)


def told(document: str) -> str:
    """The text that is asked about, without the example."""
    return document.split("another one.\n\n")[-1]


def follow(text: str) -> dict[str, str]:
    """The value of each variable; a statement may only use what stands before it."""
    values: dict[str, str] = {}
    for name, source, value in STATEMENT.findall(text):
        assert name not in values
        values[name] = values[source] if source else value
    return values


@pytest.mark.parametrize("length", [801, 1600, 2500])
def test_the_variables_with_the_value_are_expected(length: int) -> None:
    for sample in draw(length=length):
        document, question = parts(sample)
        values = follow(told(document))
        (value,) = {values[name] for name in sample.expected}
        assert len(sample.prompt) == length
        assert list(values) == list(sample.expected)
        assert len(sample.expected) == 5
        assert f"Which 5 variables have the value {value} in" in question
        assert question.endswith(f"<assistant>The variables that have the value {value} are:")
        assert [document.count(name) for name in sample.expected] == [2, 2, 2, 2, 1]
        assert not any(name in question for name in sample.expected)


def test_a_worked_example_stands_before_longer_texts_only() -> None:
    for length, shown in ((EXAMPLE_FROM - 1, False), (EXAMPLE_FROM, True)):
        for sample in draw(length=length):
            document, _ = parts(sample)
            assert document.count("Variables are given values") == 1 + shown
            assert ("be it directly or through others?" in document) == shown
    for sample in draw():
        example = parts(sample)[0].split("another one.\n\n")[1]
        values = follow(f" {example}")
        assert f"are: {', '.join(values)}." in example
        assert set(values).isdisjoint(sample.expected)
        assert len(set(values.values())) == 1
        assert set(values.values()).isdisjoint(follow(told(parts(sample)[0])).values())


@settings(max_examples=60, deadline=None)
@given(chains=st.integers(1, 4), hops=st.integers(0, 6), seed=st.integers(0, 999))
def test_any_chains_can_be_followed(chains: int, hops: int, seed: int) -> None:
    riddle = tracking(random.Random(seed), "", chains=chains, hops=hops, with_example=False)
    values = follow("".join(riddle.needles))
    asked = [name for name, value in values.items() if f"value {value} in" in riddle.question]
    assert len(values) == len(riddle.needles) == chains * (hops + 1)
    assert len(set(values.values())) == chains
    assert asked == list(riddle.expected)


@settings(max_examples=20, deadline=None)
@given(
    chains=st.integers(1, 3),
    hops=st.integers(1, 4),
    length=st.integers(1500, 4000),
    seed=st.integers(0, 99),
    depths=st.none() | st.integers(2, 5),
)
def test_statements_stand_in_order_over_the_whole_text(
    chains: int, hops: int, length: int, seed: int, depths: int | None
) -> None:
    wanted = Wanted(TOKENIZER, length, 0, seed, depths)
    sample = next(draw_tracking("chains", wanted, chains=chains, hops=hops))
    text = told(parts(sample)[0])
    places = [match.start() / len(text) for match in STATEMENT.finditer(text)]
    assert len(follow(text)) == len(places) == chains * (hops + 1)
    assert sample.depth is None
    gaps = [after - before for before, after in pairwise(places)]
    assert max(gaps) < 1 / len(places) + 60 / len(text)


def test_an_answer_counts_by_the_variables_that_it_has() -> None:
    (sample,) = draw(1)
    kind, names = SETS["ruler-vt"], sample.expected
    assert kind.is_right(names, ", ".join(names))
    assert not kind.is_right(names, ", ".join(names[:4]))
    assert not kind.is_right(names, "".join(names))
    assert found_share(names, " and ".join(names[:4])) == pytest.approx(0.8)
    assert found_share(names, "AAAAA") == 0


def test_a_length_without_room_has_no_samples() -> None:
    with pytest.raises(ConfigError, match="set ruler-vt has 0 samples with prompts of 300 tokens"):
        draw(length=300)
