"""What is asked about: a text that is on every machine with facts hidden in it, or the user's own.

A document is held as tokens, so that its length is exact for every tokenizer; paragraphs are
tokenized one by one.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import accumulate, chain

from transformers import PreTrainedTokenizerBase

from kvfold.errors import ConfigError
from kvfold.text import encode, reference_text

DEFAULT_LENGTH = 2048
"""Tokens of the built-in document."""
MINIMUM_LENGTH = 256
"""Shorter, three facts are not hidden but most of the text."""
HELD_OUT = 64
"""Tokens of the continuation that the prompt does not show."""
DEPTHS = (0.15, 0.5, 0.85)
"""Where the facts stand, as shares of the length; the middle one is asked for."""

_KINDS = (
    "telephone number of the lighthouse in Bergen",
    "access code of the library in Tallinn",
    "serial number of the museum in Nairobi",
    "licence number of the harbour in Osaka",
    "account number of the observatory in Quito",
    "registration number of the archive in Lisbon",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A number that stands once in the document."""

    subject: str
    """What the number is."""
    number: str
    """Seven digits."""
    position: int
    """Where its sentence begins, in tokens of the document."""

    @property
    def sentence(self) -> str:
        """How the document tells it."""
        return f"The {self.subject} is {self.number}."

    @property
    def question(self) -> str:
        """How it is asked for."""
        return f"What is the {self.subject}?"


@dataclass(frozen=True, slots=True)
class Document:
    """A text, a question about it, and how the text goes on."""

    name: str
    """Where the text is from."""
    tokens: list[int]
    """The text."""
    question: str
    """What is asked."""
    expected: str | None = None
    """What a right answer contains, where it is known."""
    continuation: tuple[int, ...] = ()
    """Tokens that follow the text; empty when none could be spared."""
    facts: tuple[Fact, ...] = ()
    """What was hidden in the text."""


def built_in_document(
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int = DEFAULT_LENGTH,
    seed: int = 0,
    question: str | None = None,
) -> Document:
    """Take the language reference that comes with Python and hide three facts in it.

    Args:
        tokenizer: Of the model that is asked.
        length: Tokens of the document, the facts included.
        seed: Chooses the facts; the same seed gives the same document.
        question: To ask something else than the middle fact; no answer is expected then.

    Returns:
        The document, its question and what follows the text.

    Raises:
        ConfigError: For a length that is too short for the facts or longer than the reference,
            and for an empty question.
    """
    if length < MINIMUM_LENGTH:
        raise ConfigError(
            f"a document of {length} tokens is too short to hide facts in: give a length of at "
            f"least {MINIMUM_LENGTH}"
        )
    tokens, facts = _hide(
        _reference(tokenizer, length + HELD_OUT), _choose(seed), length, tokenizer
    )
    if len(tokens) < length + HELD_OUT:
        raise ConfigError(
            f"the built-in document has {len(tokens)} tokens: give a length of at most "
            f"{len(tokens) - HELD_OUT}, or a file of your own"
        )
    asked = facts[len(facts) // 2]
    return Document(
        name="the language reference that comes with Python (pydoc_data.topics)",
        tokens=tokens[:length],
        question=asked.question if question is None else _checked(question, "the question"),
        expected=asked.number if question is None else None,
        continuation=tuple(tokens[length : length + HELD_OUT]),
        facts=facts,
    )


def document_from_text(
    tokenizer: PreTrainedTokenizerBase, text: str, question: str, *, name: str
) -> Document:
    """Ask about a text of the user's; its last tokens are held out when it is long enough.

    Args:
        tokenizer: Of the model that is asked.
        text: The document.
        question: What is asked.
        name: Where the text is from.

    Returns:
        The document; no answer is expected.

    Raises:
        ConfigError: For an empty text or question.
    """
    question = _checked(question, "the question")
    tokens = encode(tokenizer, _checked(text, "the document"))
    spare = HELD_OUT if len(tokens) >= MINIMUM_LENGTH else 0
    end = len(tokens) - spare
    return Document(name, tokens[:end], question, continuation=tuple(tokens[end:]))


def _checked(text: str, what: str) -> str:
    if not text.strip():
        raise ConfigError(f"{what} is empty: give some text")
    return text.strip()


def _reference(tokenizer: PreTrainedTokenizerBase, length: int) -> list[list[int]]:
    """The paragraphs of the topics as tokens, at least so many if there are."""
    paragraphs = [f"{part}\n\n" for part in re.split(r"\n{2,}", reference_text(length))]
    encoded = tokenizer(paragraphs, add_special_tokens=False, verbose=False)["input_ids"]
    return [list(part) for part in encoded]


def _choose(seed: int) -> list[tuple[str, str]]:
    generator = random.Random(seed)
    subjects = generator.sample(_KINDS, len(DEPTHS))
    return [(subject, _number(generator)) for subject in subjects]


def _number(generator: random.Random) -> str:
    """Seven digits, none twice: small models lose count of repeated ones."""
    digits = generator.sample("0123456789", 7)
    return "".join(digits if digits[0] != "0" else reversed(digits))


def _hide(
    paragraphs: list[list[int]],
    chosen: list[tuple[str, str]],
    length: int,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[list[int], tuple[Fact, ...]]:
    """Put each fact before the paragraph that is nearest to its depth."""
    starts = [0, *accumulate(map(len, paragraphs))]
    tokens: list[int] = []
    facts: list[Fact] = []
    done = 0
    for depth, (subject, number) in zip(DEPTHS, chosen, strict=True):
        next_one = _nearest(starts, depth * length)
        tokens += chain.from_iterable(paragraphs[done:next_one])
        facts.append(Fact(subject, number, len(tokens)))
        tokens += encode(tokenizer, f"{facts[-1].sentence}\n\n")
        done = next_one
    tokens += chain.from_iterable(paragraphs[done:])
    return tokens, tuple(facts)


def _nearest(starts: list[int], wanted: float) -> int:
    return min(range(len(starts)), key=lambda index: abs(starts[index] - wanted))
