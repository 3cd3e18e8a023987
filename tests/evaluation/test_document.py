"""Documents: exact lengths, facts where they belong, text held out."""

from __future__ import annotations

import pytest

from kvfold.errors import ConfigError
from kvfold.evaluation.document import (
    DEPTHS,
    HELD_OUT,
    built_in_document,
    document_from_text,
)
from kvfold.text import encode
from tests.tiny_folder import byte_tokenizer

LENGTH = 3000


def test_three_facts_stand_at_their_depths_once() -> None:
    tokenizer = byte_tokenizer()
    document = built_in_document(tokenizer, length=LENGTH)
    text = tokenizer.decode(document.tokens)
    assert len(document.tokens) == LENGTH
    assert len({fact.number for fact in document.facts}) == 3
    for fact, depth in zip(document.facts, DEPTHS, strict=True):
        assert text.count(fact.number) == 1
        assert len(fact.number) == 7
        assert text[fact.position :].startswith(fact.sentence)
        assert abs(fact.position / LENGTH - depth) < 0.15


def test_the_middle_fact_is_asked_for() -> None:
    document = built_in_document(byte_tokenizer(), length=LENGTH)
    middle = document.facts[1]
    assert (document.question, document.expected) == (middle.question, middle.number)


def test_the_continuation_is_what_follows() -> None:
    tokenizer = byte_tokenizer()
    short = built_in_document(tokenizer, length=LENGTH)
    assert len(short.continuation) == HELD_OUT
    # A slightly longer document hides its facts at the same paragraphs.
    longer = built_in_document(tokenizer, length=LENGTH + 10)
    assert longer.facts == short.facts
    assert longer.tokens[LENGTH:] == list(short.continuation[:10])


def test_the_seed_chooses_the_facts() -> None:
    tokenizer = byte_tokenizer()
    documents = [built_in_document(tokenizer, length=LENGTH, seed=seed) for seed in (0, 0, 1)]
    assert documents[0] == documents[1]
    assert documents[0].facts != documents[2].facts


def test_another_question_has_no_expected_answer() -> None:
    document = built_in_document(byte_tokenizer(), length=LENGTH, question=" Why? ")
    assert (document.question, document.expected) == ("Why?", None)


@pytest.mark.parametrize("length", [0, -5, 255, 10_000_000])
def test_impossible_lengths_are_refused(length: int) -> None:
    with pytest.raises(ConfigError, match="give a length of at"):
        built_in_document(byte_tokenizer(), length=length)


def test_the_end_of_a_long_text_is_held_out() -> None:
    tokenizer = byte_tokenizer()
    text = "".join(f"{index:03d} " for index in range(100))
    document = document_from_text(tokenizer, text, "What?", name="numbers.txt")
    tokens = encode(tokenizer, text.strip())
    assert document.tokens == tokens[:-HELD_OUT]
    assert list(document.continuation) == tokens[-HELD_OUT:]
    assert document.expected is None


def test_a_short_text_is_given_whole() -> None:
    tokenizer = byte_tokenizer()
    document = document_from_text(tokenizer, "A short text.", "What?", name="short.txt")
    assert tokenizer.decode(document.tokens) == "A short text."
    assert document.continuation == ()


@pytest.mark.parametrize(("text", "question"), [(" \n", "What?"), ("text", " "), ("text", "")])
def test_empty_text_or_question_is_refused(text: str, question: str) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        document_from_text(byte_tokenizer(), text, question, name="x")
