"""Passages of records among prose, and questions about two of them, answered in a terse fixed form.

    The city of Edda is Kestwick.
    ...
    Q: city of Edda; trade of Hugo
    A: Kestwick / cooper .

A quiz is such a passage with several of these questions after it. Names, values and prose are
divided in three: what is learnt from, what tells how well, and what is held out from both for a
last judgement.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from kvfold.errors import ConfigError
from kvfold.text import SHOWN, encode, leading_tokens, reference_text
from kvfold.training.passages import Passages, read_passages
from kvfold.training.prompts import Prompt, draw_prose, hide
from kvfold.training.words import FORENAMES, TOWNS, Split

Part = Literal["train", "validation", "held-out"]
"""Whose names, values and prose an item is made of; no two share any."""

_QUARTERS: tuple[Part, ...] = ("train", "train", "validation", "held-out")
"""The parts that the words of a list belong to, in turn."""
_LEAST, _MOST, _TOKENS_A_RECORD = 6, 22, 128
"""Records of an item: the first number, and one more for so many tokens, up to the second."""
_QUESTIONS, _RESERVED = 4, 48
"""Questions of a quiz, and tokens that are kept free for each while its records are chosen."""

TRADES = """
    baker barber brewer butcher carpenter carter chandler clerk cobbler cook cooper dyer farmer
    fisher glazier grocer hatter hunter jeweller joiner judge lawyer mason miller miner nurse
    painter piper pilot plumber porter potter printer ranger saddler sailor sculptor singer smith
    surgeon tailor tanner tiler tutor vet waiter weaver welder
"""
"""What people do."""
PETS = """
    badger beaver canary cat cheetah cobra cow crab crow deer dog donkey duck eagle ferret finch fox
    frog gecko goat goose hamster hare hawk hen horse lamb lion lizard llama magpie mole monkey
    mouse mule newt otter owl panda parrot pigeon pony rabbit raven robin seal sheep snail swan
    tiger toad turtle wolf wren
"""
"""What people keep."""
COLOURS = """
    amber apricot aqua azure beige black blue bronze brown charcoal cherry cobalt copper coral cream
    crimson cyan ebony emerald gold green grey indigo ivory jade khaki lavender lemon lilac lime
    magenta maroon mauve mint mustard navy ochre olive orange peach pink plum purple red rose ruby
    rust scarlet silver tan teal turquoise violet white yellow
"""
"""How things look."""
NUMBERS = " ".join(str(number) for number in range(10, 100))
"""Of two digits."""

VALUES = {"city": TOWNS, "trade": TRADES, "pet": PETS, "colour": COLOURS, "number": NUMBERS}
"""What is recorded of somebody, and what it may be."""
FORMS = ("The {attribute} of {name} is {value}.", "{name} has the {attribute} {value}.")
"""How a record is told."""
LISTS = (FORENAMES, VALUES, FORMS)
"""All that items are made of, for the record of what was learnt from."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A question about two records, and its answer."""

    question: list[int]
    """Tokens that follow the passage, up to the answer."""
    ending: list[int]
    """Tokens of the answer, and the one that ends it where the tokenizer has such a one."""
    answer: str
    """As text, without blanks around it."""
    values: tuple[str, ...]
    """What the answer must tell."""


@dataclass(frozen=True, slots=True)
class Item(Turn):
    """A passage and what is asked about it."""

    passage: list[int]
    """Tokens of the prose with its records."""


class RecordItems:
    """Draws items of one part.

    Args:
        tokenizer: Of the model.
        passages: The prose.
        part: Whose names and values are drawn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, passages: Passages, part: Part) -> None:
        self._tokenizer, self._passages, self._part = tokenizer, passages, part
        self._split: Split = "validation" if part == "validation" else "train"
        self._names = words_of_part(FORENAMES, part)
        self._values = {name: words_of_part(words, part) for name, words in VALUES.items()}
        end = tokenizer.eos_token_id
        self._end = [end] if isinstance(end, int) else []

    def draw(self, generator: random.Random, length: int, *, whole: bool = False) -> Item:
        """One item.

        Args:
            generator: Chooses.
            length: Tokens of the passage.
            whole: Let the length be that of passage, question and answer together.

        Raises:
            ConfigError: When two records do not fit into half of the passage.
        """
        facts = self._facts(generator, length)
        turn = self._turn(generator.sample(facts[:2], 2))
        room = length - (len(turn.question) + len(turn.ending) if whole else 0)
        passage = self._hidden(generator, self._lines(generator, facts, room), room)
        return Item(turn.question, turn.ending, turn.answer, turn.values, passage)

    def draw_quiz(self, generator: random.Random, length: int) -> tuple[list[int], list[Turn]]:
        """A passage and several questions, of which the first comes after it, and so on.

        Args:
            generator: Chooses.
            length: Tokens of all together.

        Raises:
            ConfigError: When two records do not fit into half of the passage.
        """
        facts = self._facts(generator, length)
        lines = self._lines(generator, facts, length - _QUESTIONS * _RESERVED)
        told = facts[: len(lines)]
        turns = [self._turn(generator.sample(told, 2)) for _ in range(_QUESTIONS)]
        room = length - sum(len(turn.question) + len(turn.ending) for turn in turns)
        return self._hidden(generator, lines, room), turns

    def _facts(self, generator: random.Random, length: int) -> list[tuple[str, str, str]]:
        """Attribute, name and value of records, no two of one attribute and name."""
        count = min(_MOST, _LEAST + length // _TOKENS_A_RECORD)
        pairs = [(attribute, name) for attribute in VALUES for name in self._names]
        return [
            (attribute, name, generator.choice(self._values[attribute]))
            for attribute, name in generator.sample(pairs, min(count, len(pairs)))
        ]

    def _turn(self, asked: Sequence[tuple[str, str, str]]) -> Turn:
        """A question about some records."""
        question = "; ".join(f"{attribute} of {name}" for attribute, name, _ in asked)
        values = tuple(value for _, _, value in asked)
        answer = f"{' / '.join(values)} ."
        asking = encode(self._tokenizer, f"\n\nQ: {question}\nA:")
        ending = [*encode(self._tokenizer, f" {answer}"), *self._end]
        return Turn(asking, ending, answer, values)

    def _lines(
        self, generator: random.Random, facts: list[tuple[str, str, str]], room: int
    ) -> list[list[int]]:
        """Records as they are told; the last ones that do not fit into half the room are left out.

        Returns:
            Tokens of each, of two at least.
        """
        half, told = (room - len(leading_tokens(self._tokenizer))) // 2, list[list[int]]()
        for attribute, name, value in facts:
            form = generator.choice(FORMS)
            line = form.format(attribute=attribute, name=name, value=value)
            tokens = encode(self._tokenizer, f"{line}\n\n")
            if sum(map(len, told)) + len(tokens) > half and len(told) >= 2:
                break
            told.append(tokens)
        return told

    def _hidden(self, generator: random.Random, told: list[list[int]], room: int) -> list[int]:
        """Records among prose, so many tokens."""
        leading, total = leading_tokens(self._tokenizer), sum(map(len, told))
        left = room - len(leading) - total
        if left < total // 2:
            raise ConfigError(
                f"no passage of records fits into {room} tokens of this tokenizer: give a larger "
                "length"
            )
        prose, places = draw_prose(self._passages, generator, self._split, left)
        return [*leading, *hide(generator, told, prose, places)]


class _Prompts:
    """What prompts about records share.

    Args:
        tokenizer: Of the model.
        passages: The prose.
        length: Tokens of a prompt, the answers included.
    """

    chat = False
    """Never in a chat template."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, passages: Passages, *, length: int
    ) -> None:
        self._length = length
        self._items = {
            "train": RecordItems(tokenizer, passages, "train"),
            "validation": RecordItems(tokenizer, passages, "validation"),
        }


class RecordPrompts(_Prompts):
    """Items as prompts of exact length, for a corpus."""

    def draw(self, generator: random.Random, split: Split) -> Prompt:
        """One prompt.

        Args:
            generator: Chooses.
            split: Whose prose, words and names it is made of.

        Raises:
            ConfigError: When none fits into the length.
        """
        item = self._items[split].draw(generator, self._length, whole=True)
        tokens = [*item.passage, *item.question, *item.ending]
        return Prompt(tokens, len(item.ending), item.answer, "records")


class QuizPrompts(_Prompts):
    """Quizzes as prompts of exact length, for a corpus; questions and answers are scored."""

    def draw(self, generator: random.Random, split: Split) -> Prompt:
        """One prompt; see `RecordPrompts.draw`."""
        passage, turns = self._items[split].draw_quiz(generator, self._length)
        after = [token for turn in turns for token in (*turn.question, *turn.ending)]
        return Prompt([*passage, *after], len(after), turns[0].answer, "quiz")


def held_out_items(
    tokenizer: PreTrainedTokenizerBase, lengths: tuple[int, ...], seed: int
) -> Iterator[Item]:
    """Items whose names, values and prose nothing was learnt from, without end.

    Args:
        tokenizer: Of the model.
        lengths: Tokens of the passages, in turn.
        seed: Of the drawing.
    """
    text = reference_text(SHOWN)[:SHOWN]
    pieces = (f"{paragraph}\n\n" for paragraph in re.split(r"\n{2,}", text))
    passages = read_passages(tokenizer, pieces, excerpt=0, name="reference")
    items, index = RecordItems(tokenizer, passages, "held-out"), 0
    while True:
        generator = random.Random(f"{seed}/held-out/{index}")
        yield items.draw(generator, lengths[index % len(lengths)])
        index += 1


def words_of_part(words: str, part: Part) -> list[str]:
    """The words of a list that belong to a part; the other parts have none of them."""
    every = words.split()
    return [word for index, word in enumerate(every) if _QUARTERS[index % 4] == part]
