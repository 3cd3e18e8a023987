"""One sample that methods are judged on, and what samples are made for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from kvfold.evaluation.document import Document
from kvfold.evaluation.prompt import Prompt, build_prompt
from kvfold.text import encode

Kind = Literal["text", "task"]
"""A text is continued as it goes on; a task is answered, and the answer is right or wrong."""

Protocol = Literal["aware", "agnostic"]
"""Whether a cache is cut after it has read the question, or before."""

_GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole part, are spread evenly however many there are."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, and how it is judged."""

    set: str
    """The set it is from."""
    index: int
    """Its place in the set."""
    prompt: list[int]
    """All tokens before what is forced or answered."""
    continuation: list[int] | None
    """Tokens that follow a text; None for a task."""
    expected: tuple[str, ...]
    """What a right answer has one of, or all of; empty for a text."""
    question: int = 0
    """Last tokens of the prompt: the question and all that stands after it; none in a text."""
    depth: float | None = None
    """Where the needle stands, 0 at the document's beginning and 1 at its end, if it was named."""
    classes: tuple[str, ...] = ()
    """Classes that an answer chooses from, where there are some."""
    left_out: int = 0
    """Tokens that were cut out of the middle of a prompt that was too long."""

    @property
    def kind(self) -> Kind:
        """Text or task."""
        return "task" if self.continuation is None else "text"

    def facts(self) -> dict[str, object]:
        """What the numbers depend on when a prompt is read as a whole, as plain data."""
        return {
            "set": self.set,
            "index": self.index,
            "prompt": self.prompt,
            "continuation": self.continuation,
            "expected": self.expected,
            "kind": self.kind,
            **({"classes": self.classes} if self.classes else {}),
        }


@dataclass(frozen=True, slots=True)
class Wanted:
    """What samples are made for."""

    tokenizer: PreTrainedTokenizerBase
    """Of the model."""
    length: int
    """Tokens of a prompt, at most."""
    tokens: int
    """Tokens of a text's continuation."""
    seed: int
    """Of all that is chosen."""
    depths: int | None = None
    """Number of depths, evenly from 0 to 1, at which needles stand in turn; anywhere without it."""

    def generator(self, *parts: object) -> random.Random:
        """Chooses for one set, or for one sample of it."""
        return random.Random(" ".join(map(str, (self.seed, *parts))))

    def depth(self, index: int, phase: float) -> float:
        """Where the needle of a sample stands, as a share of the document."""
        if self.depths is None:
            return (phase + index * _GOLDEN) % 1
        return index % self.depths / (self.depths - 1)

    def prompt(self, tokens: Iterable[int], question: str, opening: str = "") -> Prompt:
        """Put a document and a question into the chat template, or into plain text without one.

        Args:
            tokens: The document.
            question: What is asked.
            opening: With what the answer begins, put into the model's mouth.

        Returns:
            The prompt in two parts; the opening stands at the end of the second.
        """
        prompt = build_prompt(self.tokenizer, Document("", list(tokens), question))
        return Prompt(prompt.document, [*prompt.question, *encode(self.tokenizer, opening)])

    def room(self, question: str, opening: str = "") -> int:
        """Tokens that a document may have."""
        return self.length - len(self.prompt((), question, opening))


def task(
    name: str,
    index: int,
    prompt: Prompt,
    expected: tuple[str, ...],
    *,
    depth: float | None = None,
    classes: tuple[str, ...] = (),
    left_out: int = 0,
) -> Sample:
    """A sample that is answered.

    Args:
        name: The set it is from.
        index: Its place in the set.
        prompt: Document and question.
        expected: What a right answer has one of, or all of.
        depth: Of the needle, if it was named.
        classes: That an answer chooses from, where there are some.
        left_out: Tokens that were cut out of the middle.
    """
    tokens, question = [*prompt.document, *prompt.question], len(prompt.question)
    return Sample(name, index, tokens, None, expected, question, depth, classes, left_out)


def distinct(count: int, make: Callable[[], str], text: str = "") -> tuple[str, ...]:
    """So many different strings that do not stand in a text, made one by one."""
    found: dict[str, None] = {}
    while len(found) < count:
        each = make()
        if each not in text:
            found[each] = None
    return tuple(found)


def fill(
    generator: random.Random, texts: Iterable[str], room: int, tokens: dict[str, list[int]]
) -> list[str]:
    """Texts in random order, as many as there is room for."""
    left, chosen = list(texts), []
    generator.shuffle(left)
    for text in left:
        if len(tokens[text]) <= room:
            chosen.append(text)
            room -= len(tokens[text])
    return chosen
