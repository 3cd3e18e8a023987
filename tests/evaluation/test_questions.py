"""Questions with documents: whole evidence, numbers in order, and the shape of both sets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvfold.evaluation.fidelity_rows import key_of
from kvfold.evaluation.sample import Sample
from kvfold.evaluation.samples import SETS, draw_samples
from tests.evaluation.prompts import TOKENIZER, parts
from tests.evaluation.public import QUESTIONS, write_data

PINNED = "868f1b5ee851aabe95b4587af2d0408b42f02f9e981c831618e1c9d0cbf2ba7d"
"""Hash of samples of `hotpotqa` that results of record were made with."""
TASK = "Answer the question at the end from the documents"


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFOLD_DATA", str(write_data(tmp_path / "data")))


def draw(count: int = QUESTIONS, *, length: int = 1100) -> list[Sample]:
    return draw_samples(TOKENIZER, "ruler-qa", count, length=length)


def test_hotpotqa_stays_what_it_was() -> None:
    found = draw_samples(TOKENIZER, "hotpotqa", 6, length=1200, tokens=8)
    assert key_of({"samples": [sample.facts() for sample in found]}) == PINNED


@pytest.mark.parametrize("length", [700, 1100])
def test_documents_are_numbered_and_whole(length: int) -> None:
    for sample in draw(length=length):
        document, question = parts(sample)
        (answer,) = sample.expected
        number = answer.removeprefix("Town")
        assert len(sample.prompt) <= length
        assert document.startswith(f"<s><user>{TASK}")
        assert f"{TASK}, and say nothing but the answer.\n\nQuestion: Where" in question
        headings = re.findall(r"Document (\d+):\n", document)
        assert headings == [str(at) for at in range(1, len(headings) + 1)]
        assert len(headings) > 2
        own = rf":\nRiver {number}\nIt was named (?:very )*early by guide {number}\.\n\n"
        assert len(re.findall(own, document)) == 1
        assert document.count(f":\nGuide {number}\nGuide {number} was born in {answer}.\n\n") == 1
        assert answer not in question


def test_documents_fill_the_length() -> None:
    longest = max(len(f"Document {at}:\n") for at in (9, 10)) + 100
    for sample in draw(length=800):
        assert 800 - longest < len(sample.prompt)


def test_all_documents_stand_in_a_long_text() -> None:
    for sample in draw(length=4000):
        assert len(re.findall(r"Document \d+:\n", parts(sample)[0])) == 2 * QUESTIONS


def test_one_expected_answer_is_enough() -> None:
    sample, other = draw(2)
    kind = SETS["ruler-qa"]
    assert not kind.wants_all
    assert kind.is_right(sample.expected, f"In {sample.expected[0].lower()}, I think.")
    assert not kind.is_right(sample.expected, other.expected[0])
    assert kind.is_right(("north", "south"), "To the south.")
