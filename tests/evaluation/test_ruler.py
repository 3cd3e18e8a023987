"""RULER's needles: lengths, what is hidden how often and where, and what counts as right."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.evaluation import ruler
from kvfold.evaluation.answers import found_share
from kvfold.evaluation.fidelity_settings import FidelitySettings
from kvfold.evaluation.ruler import NOISE, VARIANTS
from kvfold.evaluation.ruler_words import ADJECTIVES, NOUNS, VERBS, draw_keys, draw_words
from kvfold.evaluation.sample import Sample, Wanted
from kvfold.evaluation.samples import SETS, draw_samples, expand_sets
from kvfold.text import SHOWN, reference_text
from tests.evaluation.prompts import TOKENIZER, parts
from tests.evaluation.public import write_data

LENGTH = 1600
NUMBER, UUID, WORDS = r"[1-9]{7}", r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", r"[a-z]+-[a-z]+"
LOOKS = {
    "ruler-single-1": (WORDS, NUMBER, 1, 1),
    "ruler-single-2": (WORDS, NUMBER, 1, 1),
    "ruler-single-3": (WORDS, UUID, 1, 1),
    "ruler-multikey-1": (WORDS, NUMBER, 4, 1),
    "ruler-multikey-2": (WORDS, NUMBER, None, 1),
    "ruler-multikey-3": (UUID, UUID, None, 1),
    "ruler-multivalue": (WORDS, NUMBER, 4, 4),
    "ruler-multiquery": (WORDS, NUMBER, 4, 4),
}
"""What keys and values look like, how many needles there are, and how many values are asked for."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFOLD_DATA", raising=False)


def draw(name: str, count: int = 4, **options: int) -> list[Sample]:
    return draw_samples(TOKENIZER, name, count, **{"length": LENGTH, **options})


def needles(name: str, document: str) -> list[tuple[str, str]]:
    """Keys and values that a document tells, whole sentences only."""
    key, value, *_ = LOOKS[name]
    return re.findall(rf" A secret (?:number|code) of ({key}) is: ({value})\.", document)


def test_there_are_as_many_variants_as_in_the_table() -> None:
    told = re.findall(r"^(ruler-\S+) ", ruler.__doc__ or "", re.MULTILINE)
    assert list(VARIANTS) == list(LOOKS) == told


@pytest.mark.parametrize("name", LOOKS)
def test_needles_stand_once_and_as_many_as_there_should_be(name: str) -> None:
    _, _, count, asked = LOOKS[name]
    for sample in draw(name):
        document, question = parts(sample)
        told = needles(name, document)
        assert len(sample.prompt) == LENGTH
        assert len(set(told)) == len(told)
        assert len(told) == count if count else len(told) >= 8
        assert len(sample.expected) == asked
        for value in sample.expected:
            assert document.count(value) == 1
            assert value not in question


@pytest.mark.parametrize("name", LOOKS)
def test_the_values_of_the_keys_in_the_question_are_expected(name: str) -> None:
    key, *_ = LOOKS[name]
    for sample in draw(name):
        document, question = parts(sample)
        asked, opening = question.split("<assistant>")
        keys = re.findall(rf"(?:of|,|and) ({key})(?=[, ])", asked)
        assert keys == re.findall(rf"(?:of|,|and) ({key})(?=[, ])", opening)
        told = needles(name, document)
        assert {value for each, value in told if each in keys} == set(sample.expected)
        assert opening.startswith("The secret ")
        assert document.index("secret numbers" if "number" in asked else "secret codes") < 120


@pytest.mark.parametrize(("name", "keys"), [("ruler-multivalue", 1), ("ruler-multiquery", 4)])
def test_values_of_one_key_or_of_several_are_asked_for(name: str, keys: int) -> None:
    for sample in draw(name):
        assert len({key for key, _ in needles(name, parts(sample)[0])}) == keys


def test_needles_stand_in_noise_in_prose_or_among_others() -> None:
    prose = " ".join(reference_text(SHOWN)[:SHOWN].split())

    def between(name: str) -> Iterable[str]:
        document = parts(draw(name, 1)[0])[0].split("end.\n\n")[1]
        return (each.strip() for each in re.split(r" A secret \w+ of \S+ is: \S+\.", document))

    assert all(each in f"{NOISE} " * 99 for each in between("ruler-single-1"))
    for each in between("ruler-single-2"):
        assert " ".join(each.split()) in f"{prose} {prose}"
    *whole, cut = between("ruler-multikey-2")
    assert set(whole) == {""}
    assert cut == "" or "A secret number of".startswith(cut[:18])


@pytest.mark.parametrize("name", LOOKS)
def test_more_samples_than_the_prose_has_windows(name: str) -> None:
    found = draw(name, 25, length=900)
    assert len({tuple(sample.prompt) for sample in found}) == 25
    assert found[:24] == draw(name, 24, length=900)


def test_prose_begins_anew_where_it_is_too_short() -> None:
    (sample,) = draw("ruler-single-2", 1, length=3 * SHOWN)
    assert len(sample.prompt) == 3 * SHOWN
    assert parts(sample)[0].count(sample.expected[0]) == 1


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from([name for name in LOOKS if "-2" not in name and "-3" not in name]),
    length=st.integers(2500, 5000),
    depths=st.integers(2, 7),
    seed=st.integers(0, 99),
)
def test_needles_stand_at_their_depths_at_any_length(
    name: str, length: int, depths: int, seed: int
) -> None:
    for index, sample in enumerate(draw(name, depths, length=length, depths=depths, seed=seed)):
        document = parts(sample)[0].split("end.\n\n")[1]
        begin = document.index(f"is: {sample.expected[0]}")
        sentences = sum(
            len(f" A secret number of {key} is: {value}.") for key, value in needles(name, document)
        )
        slack = (sentences + 700) / len(document)
        assert len(sample.prompt) == length
        assert sample.depth == index / (depths - 1)
        assert begin / len(document) == pytest.approx(sample.depth, abs=slack)


@settings(max_examples=30, deadline=None)
@given(length=st.integers(700, 3000), depths=st.integers(2, 7), seed=st.integers(0, 99))
def test_in_noise_a_needle_is_as_near_to_its_depth_as_a_sentence_allows(
    length: int, depths: int, seed: int
) -> None:
    for sample in draw("ruler-single-1", depths, length=length, depths=depths, seed=seed):
        document = parts(sample)[0].split("end.\n\n")[1]
        sentence = re.search(r" A secret number of \S+ is: \d+\.", document)
        assert sentence is not None
        room = len(document) - len(sentence[0])
        assert sample.depth is not None
        assert abs(sentence.start() - sample.depth * room) <= len(" Then all is quiet again.")


def test_several_needles_stand_apart() -> None:
    for sample in draw("ruler-multiquery", 5, depths=5):
        document, _ = parts(sample)
        places = sorted(document.index(value) for value in sample.expected)
        assert min(after - before for before, after in pairwise(places)) > 60


@pytest.mark.parametrize("name", LOOKS)
def test_right_answers_are_right_and_others_are_not(name: str) -> None:
    (sample, other) = draw(name, 2)
    kind, said = SETS[name], ", ".join(sample.expected)
    assert kind.wants_all
    assert kind.is_right(sample.expected, f" {said}.")
    assert found_share(sample.expected, said) == 1
    for wrong in ("", ", ".join(other.expected), said[:-1], f"{said}0"):
        assert not kind.is_right(sample.expected, wrong)
    if len(sample.expected) == 4:
        assert found_share(sample.expected, ", ".join(sample.expected[1:])) == 0.75


def test_a_length_without_room_has_no_samples() -> None:
    with pytest.raises(ConfigError, match="set ruler-multiquery has 0 samples with prompts of 400"):
        draw("ruler-multiquery", length=400)
    needles = VARIANTS["ruler-multikey-2"]
    wanted = Wanted(TOKENIZER, 10_000_000, 0, 0)
    assert list(needles.others(wanted, wanted.generator())) == []


def test_the_group_is_all_whose_data_is_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (*LOOKS, "ruler-vt", "ruler-cwe", "ruler-fwe")
    assert expand_sets(["prose", "ruler"]) == ("prose", *made)
    monkeypatch.setenv("KVFOLD_DATA", str(tmp_path / "none"))
    assert expand_sets(["ruler"]) == made
    monkeypatch.setenv("KVFOLD_DATA", str(write_data(tmp_path / "data")))
    assert expand_sets(["ruler"]) == (*made, "ruler-qa")


def test_answers_may_be_as_long_as_each_set_needs() -> None:
    names = ("niah", "ruler-single-3", "ruler-vt", "ruler-cwe", "prose")
    asked = FidelitySettings(sets=names, tokens=7)
    assert [asked.tokens_after(name) for name in names] == [32, 48, 40, 64, 7]
    asked = replace(asked, max_new_tokens=5)
    assert [asked.tokens_after(name) for name in names] == [5, 5, 5, 5, 7]


def test_words_are_different_and_keys_are_new_to_a_text() -> None:
    singles = [*ADJECTIVES, *NOUNS, *VERBS]
    assert len(set(singles)) == len(singles)
    own = Wanted(TOKENIZER, 1, 0, 0).generator("words")
    many = draw_words(own, 10_000)
    assert len(set(many)) == 10_000
    assert set(many[: len(singles)]) == set(singles)
    assert set(draw_words(own, 50)) < set(singles)
    text = " ".join(draw_keys(own, "", 12_000))
    assert not any(key in text for key in draw_keys(own, text, 300))


@pytest.mark.real
def test_answers_fit_with_the_tokenizer_of_the_default_model(default_model) -> None:
    _, tokenizer = default_model
    for name in expand_sets(["ruler"]):
        for sample in draw_samples(tokenizer, name, 3, length=2048):
            said = " ".join(f"{at}. {word}," for at, word in enumerate(sample.expected, start=1))
            assert len(tokenizer(said)["input_ids"]) < SETS[name].new_tokens
