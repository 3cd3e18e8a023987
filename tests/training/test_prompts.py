"""Generated prompts: exact lengths, whole answers, and something far before that tells them."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.errors import ConfigError
from kvfold.evaluation import document
from kvfold.text import encode, unseen_paragraphs
from kvfold.training import facts, forms
from kvfold.training.passages import read_passages
from kvfold.training.problems import KINDS, Cast
from kvfold.training.prompts import ArithmeticPrompts, Prompt, RetrievalPrompts, hide
from kvfold.training.words import LISTS, SPLITS, Split, words_of
from tests.tiny_folder import byte_tokenizer

Writer = RetrievalPrompts | ArithmeticPrompts

TEXT_TASKS = {"fact", "facts", "chain", "recital"}


@cache
def writer(kind: str, length: int, *, chat: bool = True) -> Writer:
    tokenizer = byte_tokenizer() if chat else byte_tokenizer(template=None)
    return build(kind, length, tokenizer)


def build(kind: str, length: int, tokenizer: PreTrainedTokenizerBase) -> Writer:
    if kind == "arithmetic":
        return ArithmeticPrompts(tokenizer, length=length)
    prose = read_passages(tokenizer, unseen_paragraphs()[:400], excerpt=0, name="prose")
    return RetrievalPrompts(tokenizer, prose, length=length)


def draw(kind: str, length: int, seed: int, split: Split = "train", **options: bool) -> Prompt:
    return writer(kind, length, **options).draw(random.Random(seed), split)


def text_of(tokens: list[int]) -> str:
    return str(byte_tokenizer().decode(tokens))


@pytest.mark.parametrize("kind", ["retrieval", "arithmetic"])
@given(length=st.integers(64, 3000), seed=st.integers(0, 10**6), split=st.sampled_from(SPLITS))
@settings(max_examples=40, deadline=None)
def test_lengths_are_exact_and_answers_whole(
    kind: str, length: int, seed: int, split: Split
) -> None:
    tokenizer = byte_tokenizer()
    prompt = cached_prose(kind, length, tokenizer).draw(random.Random(seed), split)
    assert len(prompt.tokens) == length
    assert 0 < prompt.scored < length
    assert text_of(prompt.tokens[-prompt.scored :]).lstrip(" ").startswith(prompt.answer)


def cached_prose(kind: str, length: int, tokenizer: PreTrainedTokenizerBase) -> Writer:
    """A writer for any length without tokenizing the prose again."""
    if kind == "arithmetic":
        return ArithmeticPrompts(tokenizer, length=length)
    other = writer(kind, 64)
    assert isinstance(other, RetrievalPrompts)
    return RetrievalPrompts(tokenizer, other.passages, length=length)


@pytest.mark.parametrize("kind", ["retrieval", "arithmetic"])
def test_a_seed_gives_one_prompt(kind: str) -> None:
    assert draw(kind, 900, 5) == draw(kind, 900, 5) != draw(kind, 900, 6)


def test_what_is_asked_for_stands_before_at_many_depths() -> None:
    depths: list[float] = []
    for seed in range(120):
        prompt = draw("retrieval", 2500, seed)
        before = text_of(prompt.tokens[: -prompt.scored])
        assert prompt.answer in before, prompt.task
        depths.append(before.index(prompt.answer) / len(before))
    assert min(depths) < 0.2
    assert max(depths) > 0.8
    assert all(
        sum(low <= depth < low + 0.25 for depth in depths) >= 8 for low in (0, 0.25, 0.5, 0.75)
    )


def test_all_tasks_are_drawn_in_chat_and_in_plain_text() -> None:
    prompts = [draw("retrieval", 2500, seed) for seed in range(150)]
    assert {prompt.task for prompt in prompts} == TEXT_TASKS
    chats = ["<user>" in text_of(prompt.tokens) for prompt in prompts]
    assert 50 < sum(chats) < 100
    assert not any(
        "<user>" in text_of(draw("retrieval", 2500, seed, chat=False).tokens) for seed in range(30)
    )


def test_some_questions_stand_before_the_text() -> None:
    first = [text_of(draw("retrieval", 2500, seed, chat=False).tokens) for seed in range(60)]
    count = sum(text.startswith("While reading") or "Read on" in text[:200] for text in first)
    assert 5 < count < 40


def test_two_questions_have_two_answers() -> None:
    tokenizer = byte_tokenizer()
    turns = [forms.Turn("First?", "", "one"), forms.Turn("Second?", "", "two")]
    layout = forms.Layouts(tokenizer).plain(turns, forms.PLAIN[0])
    assert (text_of(layout.ask), text_of(layout.answer)) == (
        "\n\nQ: First?\nA:",
        " one\n\n\nQ: Second?\nA: two\n",
    )
    found = [draw("retrieval", 2500, seed) for seed in range(150)]
    assert 5 < sum(prompt.task == "facts" for prompt in found) < 60


def test_a_chat_has_the_answer_in_the_turn_of_the_assistant() -> None:
    layouts = forms.Layouts(byte_tokenizer())
    turns = [forms.Turn("First?", "", "one"), forms.Turn("Second?", "", "two")]
    chats = [layouts.draw(random.Random(seed), turns, chat=forms.CHAT[:1]) for seed in range(9)]
    layout = next(layout for layout in chats if layout.chat)
    assert text_of(layout.head) == "<s><user>"
    assert text_of(layout.ask) == "\n\nFirst?<assistant>"
    assert text_of(layout.answer) == "one<user>Second?<assistant>two"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{{ messages[0]['content'] }}"]
)
def test_templates_that_do_not_take_a_dialogue_are_left_out(template: str) -> None:
    assert not forms.Layouts(byte_tokenizer(template=template)).chat
    assert forms.Layouts(byte_tokenizer()).chat


def test_both_sentences_of_a_chain_are_needed() -> None:
    for seed in range(50):
        fact = facts.draw_chain(random.Random(seed), "train")
        first, second = fact.sentences
        assert fact.key in first
        assert fact.answer not in first
        assert fact.answer in second
        assert fact.key not in second
        assert fact.key in fact.question
        assert fact.key in fact.stem


def test_splits_share_no_word() -> None:
    for words in LISTS:
        train, validation = words_of(words, "train"), words_of(words, "validation")
        assert not set(train) & set(validation)
        assert len(set(train)) == len(train)
        assert len(train) >= 24
        assert len(validation) >= 8


def test_prompts_name_only_people_and_towns_of_their_split() -> None:
    names = {
        split: {word for words in LISTS[:3] for word in words_of(words, split)} for split in SPLITS
    }
    seen: Counter[str] = Counter()
    for split, other in (SPLITS, SPLITS[::-1]):
        for seed in range(40):
            for kind in ("retrieval", "arithmetic"):
                text = text_of(draw(kind, 1500, seed, split).tokens)
                found = set(re.findall(r"[A-Z][a-z]+", text))
                assert not found & names[other]
                seen[split] += len(found & names[split])
    assert min(seen.values()) > 100


def test_worked_problems_are_right() -> None:
    for kind in KINDS:
        for seed in range(30):
            problem = kind(Cast(random.Random(seed), "train"))
            sums = re.findall(r"([\d*+/ -]*\d) = (\d+)", " ".join(problem.steps))
            assert len(sums) >= 2
            for calculation, result in sums:
                assert eval(calculation) == int(result), problem
            assert int(sums[-1][1]) == problem.result > 0


def test_arithmetic_shows_many_problems_before_the_last() -> None:
    prompt = draw("arithmetic", 3000, 1, chat=False)
    assert prompt.task == "problem"
    assert text_of(prompt.tokens).count("Result: ") >= 5
    assert text_of(prompt.tokens[-prompt.scored :]).count("Result: ") == 1


def test_short_prompts_have_tasks_that_fit() -> None:
    tasks = {draw("retrieval", 64, seed).task for seed in range(20)}
    assert "token" in tasks
    assert {draw("arithmetic", 64, seed).task for seed in range(20)} == {"sum"}


@pytest.mark.parametrize("kind", ["retrieval", "arithmetic"])
def test_lengths_for_no_task_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"no {kind} prompt fits into 8 tokens"):
        draw(kind, 8, 0)


def test_sentences_are_put_between_paragraphs_and_whole() -> None:
    prose = list(range(1000))
    places = list(range(0, 1000, 50))
    for seed in range(40):
        text = hide(random.Random(seed), [[-1, -2, -3], [-4, -5]], prose, places)
        assert [token for token in text if token >= 0] == prose
        begin, other = text.index(-1), text.index(-4)
        assert text[begin : begin + 3] == [-1, -2, -3]
        assert text[other : other + 2] == [-4, -5]
        following = next(token for token in [*text[begin:], 1000] if token >= 0)
        assert following in {*places, 1000} or following == begin


def test_evaluation_asks_in_other_words() -> None:
    told = " ".join(
        text
        for relation in (*facts.RELATIONS, *facts.CHAINS)
        for text in (*relation.questions, *relation.stems)
    )
    fact = document.Fact(document._KINDS[0], "1234567", 0)
    pieces = ("What is the ", *(kind.split(" of ")[0] for kind in document._KINDS))
    assert fact.question.startswith(pieces[0])
    assert not [piece for piece in pieces if piece in told]


@pytest.mark.real
def test_answers_are_whole_for_the_default_tokenizer(
    default_model: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    tokenizer = default_model[1]
    for kind in ("retrieval", "arithmetic"):
        made = build(kind, 512, tokenizer)
        assert made.chat
        for seed in range(40):
            prompt = made.draw(random.Random(seed), "train")
            tail = str(tokenizer.decode(prompt.tokens[-prompt.scored :]))
            assert len(prompt.tokens) == 512
            assert tail.lstrip(" ").startswith(prompt.answer)
            # The answer's tokens are the ones the tokenizer has for it where it stands.
            spaced = tail[: tail.index(prompt.answer) + len(prompt.answer)]
            ids = encode(tokenizer, spaced)
            assert prompt.tokens[-prompt.scored :][: len(ids) - 1] == ids[:-1]
            before = str(tokenizer.decode(prompt.tokens[: -prompt.scored]))
            assert kind == "arithmetic" or prompt.answer in before
