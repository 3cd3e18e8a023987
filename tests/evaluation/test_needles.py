"""Numbers hidden in prose: where they stand, how often, and what is asked."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from kvfold.evaluation.fidelity_rows import key_of
from kvfold.evaluation.needles import KEYS, VALUES
from kvfold.evaluation.sample import Sample
from kvfold.evaluation.samples import draw_samples
from tests.evaluation.prompts import TOKENIZER, parts
from tests.evaluation.public import write_data

PINNED = {
    "niah": "96f29b30e687574900d7e25efdae2ccc32d1389a4d849378d8ea764f6e6e3aea",
    "niah-multikey": "ff3e1b2342209c192ab75663caeb35c750ca9679fa568b58a9daa8c0f16bb597",
    "niah-multivalue": "040559bd020ff4ec4e8fad8f6eb4a9d9f26cb19472795a1039836f553437451e",
}
"""Hashes of samples that results of record were made with."""
NEEDLES = tuple(PINNED)
LENGTH = 1200


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFOLD_DATA", str(write_data(tmp_path / "data")))


def draw(name: str, count: int = 4, *, depths: int | None = None) -> list[Sample]:
    return draw_samples(TOKENIZER, name, count, length=LENGTH, depths=depths)


@pytest.mark.parametrize("name", NEEDLES)
def test_numbers_stand_once_in_the_document_and_not_in_the_question(name: str) -> None:
    for sample in draw(name):
        document, question = parts(sample)
        assert len(sample.prompt) == LENGTH
        for number in sample.expected:
            assert re.fullmatch(r"[1-9]{7}", number)
            assert document.count(number) == 1
            assert number not in question


def test_one_of_several_keys_is_asked_for() -> None:
    for sample in draw("niah-multikey"):
        document, question = parts(sample)
        needles = dict(re.findall(r" The special magic number for (\w+) is (\d{7})\.", document))
        assert len(needles) == len(set(needles.values())) == KEYS
        asked = re.search(r"special magic number for (\w+) mentioned in the text\?", question)
        assert asked is not None
        assert (needles[asked[1]],) == sample.expected
        opening = f"<assistant>The special magic number for {asked[1]} mentioned in the text is"
        assert question.endswith(opening)


def test_all_values_of_one_key_are_asked_for() -> None:
    for sample in draw("niah-multivalue"):
        document, question = parts(sample)
        pattern = r" One of the special magic numbers for (\w+) is: (\d{7})\."
        needles = re.findall(pattern, document)
        assert len(needles) == len(set(sample.expected)) == VALUES
        ((key, _), *_) = needles
        assert {each for each, _ in needles} == {key}
        assert {number for _, number in needles} == set(sample.expected)
        assert question.endswith(f"<assistant>The special magic numbers for {key} are ")


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_stand_at_the_depths_in_turn(name: str) -> None:
    found = draw(name, 10, depths=5)
    assert [sample.depth for sample in found] == [0.0, 0.25, 0.5, 0.75, 1.0] * 2
    for sample in found:
        document, _ = parts(sample)
        begin = document.index(sample.expected[0])
        assert sample.depth == pytest.approx(begin / len(document), abs=0.12)


def test_several_needles_stand_apart() -> None:
    for sample in draw("niah-multivalue", 5, depths=5):
        document, _ = parts(sample)
        places = sorted(document.index(number) for number in sample.expected)
        assert min(after - before for before, after in itertools.pairwise(places)) > 200


@pytest.mark.parametrize("name", NEEDLES)
def test_depths_change_nothing_where_none_are_named(name: str) -> None:
    facts = [sample.facts() for sample in draw(name, 6)]
    assert {sample.depth for sample in draw(name, 6)} == {None}
    assert key_of({"samples": facts}) == PINNED[name]
