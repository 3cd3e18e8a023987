"""Common and frequent words: how often they stand, and that no other word stands as often."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.evaluation.answers import found_share
from kvfold.evaluation.ruler_counting import COMMON, ZETA, coded_count
from kvfold.evaluation.ruler_tracking import EXAMPLE_FROM
from kvfold.evaluation.ruler_words import ADJECTIVES, NOUNS, VERBS
from kvfold.evaluation.sample import Sample
from kvfold.evaluation.samples import SETS, draw_samples
from tests.evaluation.prompts import TOKENIZER, parts

ENTRY = re.compile(r" (\d+)\. ([a-z]+)")


def draw(name: str, count: int = 3, *, length: int, seed: int = 0) -> list[Sample]:
    return draw_samples(TOKENIZER, name, count, length=length, seed=seed)


def listed(sample: Sample) -> list[tuple[str, str]]:
    """Numbers and words of the list that is asked about."""
    return ENTRY.findall(parts(sample)[0].split("stand in it often.\n\n")[-1])


def coded(sample: Sample) -> list[str]:
    """The words of a coded text."""
    return parts(sample)[0].split("stands in it.\n\n")[1].split()


@pytest.mark.parametrize(("length", "often", "seldom"), [(950, 6, 1), (3000, 6, 1), (9000, 30, 3)])
def test_common_words_stand_often_and_others_seldom(length: int, often: int, seldom: int) -> None:
    for sample in draw("ruler-cwe", 2, length=length):
        entries = listed(sample)
        assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
        counts = Counter(word for _, word in entries)
        assert {word for word, _ in counts.most_common(COMMON)} == set(sample.expected)
        assert {counts.pop(word) for word in sample.expected} == {often}
        assert set(counts.values()) == {seldom}
        assert len(counts) > 3
        assert not any(word in parts(sample)[1] for word in sample.expected)


def test_a_worked_example_has_other_words() -> None:
    for sample in draw("ruler-cwe", length=3000):
        example = parts(sample)[0].split("stand in it often.\n\n")[1]
        listing, answer = example.split("\n\n")[:2]
        counts = Counter(word for _, word in ENTRY.findall(f" {listing}"))
        shown = [word for _, word in ENTRY.findall(answer)]
        assert len(shown) == COMMON
        assert {counts.pop(word) for word in shown} == {3}
        assert set(counts.values()) == {1}
        assert {*shown, *counts}.isdisjoint(word for _, word in listed(sample))
    (short,) = draw("ruler-cwe", 1, length=EXAMPLE_FROM - 1)
    assert parts(short)[0].count("Below is a numbered list") == 1


@settings(max_examples=8, deadline=None)
@given(length=st.integers(2000, 4000), seed=st.integers(0, 99))
def test_lists_are_as_long_as_they_can_be(length: int, seed: int) -> None:
    (sample,) = draw("ruler-cwe", 1, length=length, seed=seed)
    assert length - len(" 1000. cupboardumbrella") < len(sample.prompt) <= length


@settings(max_examples=20, deadline=None)
@given(length=st.integers(800, 6000), seed=st.integers(0, 99))
def test_coded_words_follow_the_zeta_distribution(length: int, seed: int) -> None:
    (sample,) = draw("ruler-fwe", 1, length=length, seed=seed)
    words = coded(sample)
    counts = Counter(words).most_common()
    assert counts[0][0] == "..."
    assert tuple(word for word, _ in counts[1:4]) == sample.expected
    assert counts[3][1] > counts[4][1]
    assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in counts[1:])
    totals = [total for total in range(2 * len(words)) if coded_count(total, 1) == counts[0][1]]
    found = [count for _, count in counts]
    made = [[coded_count(total, at) for at in range(1, len(found) + 1)] for total in totals]
    assert found in made
    assert length - 60 < len(sample.prompt) <= length
    assert not any(word in parts(sample)[1] for word in sample.expected)


def test_counts_are_those_of_the_formula() -> None:
    assert pytest.approx(sum(rank**-2.0 for rank in range(1, 100_000)), abs=1e-4) == ZETA
    assert [coded_count(1000, rank) for rank in range(1, 6)] == [607, 151, 67, 37, 24]


@pytest.mark.parametrize(("name", "length"), [("ruler-cwe", 2600), ("ruler-fwe", 1200)])
def test_an_answer_counts_by_the_words_that_it_has(name: str, length: int) -> None:
    sample, other = draw(name, 2, length=length)
    kind, words = SETS[name], sample.expected
    numbered = " ".join(f"{at}. {word}" for at, word in enumerate(words[::-1], start=1))
    assert kind.is_right(words, numbered)
    assert not kind.is_right(words, ", ".join(words[1:]))
    assert not kind.is_right(words, "".join(words))
    assert found_share(words, ", ".join(words[1:])) == pytest.approx(1 - 1 / len(words))
    assert not kind.is_right(words, ", ".join(other.expected))


@pytest.mark.parametrize(
    ("name", "length"),
    [("ruler-cwe", 50), ("ruler-cwe", 600), ("ruler-fwe", 50), ("ruler-fwe", 400)],
)
def test_a_length_without_room_has_no_samples(name: str, length: int) -> None:
    with pytest.raises(ConfigError, match=f"set {name} has 0 samples with prompts of {length}"):
        draw(name, length=length)


def test_long_lists_take_compounds() -> None:
    (sample,) = draw("ruler-cwe", 1, length=12_000 * 2)
    words = {word for _, word in listed(sample)}
    assert len({*ADJECTIVES, *NOUNS, *VERBS}) < len(words)
    assert {first + second for first in NOUNS for second in NOUNS} & words
