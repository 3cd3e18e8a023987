"""Passages of records: exact lengths, answers that stand in them, and parts that share nothing."""

from __future__ import annotations

import random
from functools import cache
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import ConfigError
from kvfold.text import unseen_paragraphs
from kvfold.training import open_corpus
from kvfold.training.passages import read_passages
from kvfold.training.records import (
    FORENAMES,
    FORMS,
    VALUES,
    Part,
    RecordItems,
    held_out_items,
    words_of_part,
)
from tests.tiny_folder import byte_tokenizer

PARTS: tuple[Part, ...] = ("train", "validation", "held-out")


@cache
def items(part: Part) -> RecordItems:
    tokenizer = byte_tokenizer()
    prose = read_passages(tokenizer, unseen_paragraphs()[:400], excerpt=0, name="prose")
    return RecordItems(tokenizer, prose, part)


def text_of(tokens: list[int]) -> str:
    return str(byte_tokenizer().decode(tokens))


@given(length=st.integers(500, 4000), seed=st.integers(0, 10**6), part=st.sampled_from(PARTS))
@settings(max_examples=40, deadline=None)
def test_the_answer_stands_in_the_passage(length: int, seed: int, part: Part) -> None:
    item = items(part).draw(random.Random(seed), length)
    assert len(item.passage) == length
    text, question = text_of(item.passage), text_of(item.question)
    asked = question.removeprefix("\n\nQ: ").removesuffix("\nA:").split("; ")
    assert len(asked) == len(item.values) == 2
    for each, value in zip(asked, item.values, strict=True):
        attribute, _, name = each.partition(" of ")
        forms = (f"The {each} is {value}.", f"{name} has the {attribute} {value}.")
        assert sum(text.count(form) for form in forms) == 1
        assert text.count(f"The {each} is") + text.count(f"{name} has the {attribute} ") == 1
    assert item.answer == f"{item.values[0]} / {item.values[1]} ."
    assert text_of(item.ending[:-1]) == f" {item.answer}"
    assert item.ending[-1] == byte_tokenizer().eos_token_id


def test_whole_prompts_have_the_length() -> None:
    item = items("train").draw(random.Random(3), 700, whole=True)
    assert len(item.passage) + len(item.question) + len(item.ending) == 700


def test_the_same_seed_draws_the_same() -> None:
    assert items("train").draw(random.Random(3), 700) == items("train").draw(random.Random(3), 700)


@pytest.mark.parametrize("words", [FORENAMES, *VALUES.values()])
def test_parts_share_no_word_and_none_is_left_out(words: str) -> None:
    parts = [words_of_part(words, part) for part in PARTS]
    assert sorted(word for part in parts for word in part) == sorted(set(words.split()))
    assert min(map(len, parts)) >= 10


def test_too_short_a_passage_is_refused() -> None:
    with pytest.raises(ConfigError, match="no passage of records fits into 80 tokens"):
        items("train").draw(random.Random(0), 80)


def test_held_out_items_have_their_lengths_in_turn() -> None:
    tokenizer = byte_tokenizer()
    found = list(islice(held_out_items(tokenizer, (600, 900), seed=1), 4))
    assert [len(item.passage) for item in found] == [600, 900, 600, 900]
    assert found == list(islice(held_out_items(tokenizer, (600, 900), seed=1), 4))
    assert len({item.answer for item in found}) > 1
    learnt = {
        word
        for words in VALUES.values()
        for part in PARTS[:2]
        for word in words_of_part(words, part)
    }
    assert not learnt & {value for item in found for value in item.values}


def test_a_corpus_of_records_scores_the_answer_alone() -> None:
    tokenizer = byte_tokenizer()
    corpus = open_corpus(["records"], tokenizer, length=600, seed=0)
    excerpt = corpus.excerpt(4, "train")
    assert len(excerpt.tokens) == 600
    assert excerpt.scored is not None
    asked = text_of(excerpt.tokens[: -excerpt.scored].tolist())
    told = text_of(excerpt.tokens[-excerpt.scored : -1].tolist())
    assert asked.endswith("\nA:")
    assert told.endswith(" .")
    assert " / " in told


def test_a_quiz_asks_several_questions_about_records_that_are_told() -> None:
    tokenizer = byte_tokenizer()
    corpus = open_corpus(["quiz"], tokenizer, length=1200, seed=0)
    for split in ("train", "validation"):
        excerpt = corpus.excerpt(2, split)
        assert len(excerpt.tokens) == 1200
        assert excerpt.scored is not None
        passage = text_of(excerpt.tokens[: -excerpt.scored].tolist())
        turns = text_of(excerpt.tokens[-excerpt.scored :].tolist()).split("Q: ")[1:]
        assert len(turns) == 4
        for turn in turns:
            question, answer = turn.split("\nA: ")
            values = answer.split(" .")[0].split(" / ")
            for asked, value in zip(question.split("; "), values, strict=True):
                attribute, name = asked.split(" of ")
                told = [
                    form.format(attribute=attribute, name=name, value=value) in passage
                    for form in FORMS
                ]
                assert any(told)
