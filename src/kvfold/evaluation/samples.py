"""Held-out samples that methods are judged on: texts with their continuation, and tasks.

Every set is deterministic in a seed, and its first N samples are the same for every N. Nothing of
it is learnt from: the built-in prose is the part of Python's reference that training leaves out,
and the worked problems are not among those that are asked.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Literal

from transformers import PreTrainedTokenizerBase

from kvfold.errors import ConfigError
from kvfold.evaluation.answers import contains_one, ends_with_number
from kvfold.evaluation.document import Document
from kvfold.evaluation.prompt import build_prompt
from kvfold.evaluation.public_data import (
    GSM8K,
    HOTPOTQA,
    WIKITEXT,
    data_folder,
    problems,
    questions,
    require_data,
    wikitext,
)
from kvfold.registry import Registry
from kvfold.text import SHOWN, encode, leading_tokens, reference_text

Kind = Literal["text", "task"]
"""A text is continued as it goes on; a task is answered, and the answer is right or wrong."""

VERSION = 1
"""Of the sets: the same version, data, tokenizer and seed give the same samples."""
EXEMPLARS = 100
"""So many last problems serve as worked ones, and are never asked."""

_SHIFTS = (0.0, 0.5, 0.25, 0.75)
"""Windows of a text stand side by side; when these are used up, they are shifted by such shares."""
_GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole part, are spread evenly however many there are."""

_NUMBERS = (
    "ticket number of the ferry to",
    "tracking number of the parcel from",
    "booking number of the hotel in",
    "batch number of the cheese from",
    "catalogue number of the map of",
)
_PLACES = (
    *("Zanzibar", "Reykjavik", "Valparaiso", "Ljubljana", "Marrakesh", "Hobart", "Tbilisi"),
    *("Halifax", "Cartagena", "Samarkand", "Tromso", "Windhoek", "Salamanca", "Hanoi"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, and how it is judged."""

    set: str
    """The set it is from."""
    index: int
    """Its place in the set."""
    prompt: list[int]
    """Tokens that are prefilled."""
    continuation: list[int] | None
    """Tokens that follow a text; None for a task."""
    expected: tuple[str, ...]
    """What a right answer has one of; empty for a text."""
    kind: Kind
    """Text or task."""


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

    def generator(self, *parts: object) -> random.Random:
        """Chooses for one set, or for one sample of it."""
        return random.Random(" ".join(map(str, (self.seed, *parts))))


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Where samples of one name come from."""

    kind: Kind
    """Text or task."""
    draw: Callable[[Wanted], Iterator[Sample]]
    """All there are, in an order that the seed gives."""
    file: str | None = None
    """The public data it needs."""
    is_right: Callable[[Iterable[str], str], bool] = contains_one
    """Whether an answer is right."""


SETS: Registry[SampleSet] = Registry("set")
"""Every set by its name."""


def default_sets() -> tuple[str, ...]:
    """All sets of public data where there is a folder of it, else those that need none."""
    return ("prose", "niah") if data_folder() is None else ("wikitext", "hotpotqa", "niah", "gsm8k")


def require_sets(names: Iterable[str]) -> None:
    """Refuse unknown sets, and those whose data cannot be had.

    Raises:
        ConfigError: Saying what to do.
    """
    for name in names:
        file = SETS[name].file
        if file is not None:
            require_data(file)


def draw_samples(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    count: int,
    *,
    length: int,
    tokens: int = 0,
    seed: int = 0,
) -> list[Sample]:
    """The first samples of a set.

    Args:
        tokenizer: Of the model.
        name: Of the set.
        count: How many.
        length: Tokens of a prompt: exactly in `wikitext`, `prose` and `niah`, at most elsewhere.
        tokens: Tokens of a text's continuation.
        seed: Of all that is chosen.

    Returns:
        `count` samples.

    Raises:
        ConfigError: When the set is unknown, its data cannot be had, or it has fewer samples of
            that length.
    """
    wanted = Wanted(tokenizer, length, tokens, seed)
    found = list(islice(SETS[name].draw(wanted), count))
    if len(found) < count:
        raise ConfigError(
            f"set {name} has {len(found)} samples with prompts of {length} tokens, and {count} are "
            "wanted: ask for fewer samples, or another length"
        )
    return found


class _Prose:
    """A text as tokens, sentence by sentence."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
        sentences = re.split(r"(?<=[.!?])(?=\s)", text)
        ids = tokenizer(sentences, add_special_tokens=False, verbose=False)["input_ids"]
        self.starts = [0, *accumulate(map(len, ids))]
        self.tokens: list[int] = list(chain.from_iterable(ids))

    def sentence_near(self, place: float, begin: int, end: int) -> int:
        """Where a sentence begins, as near to a place as possible between two others."""
        inside = [start for start in self.starts if begin <= start <= end] or [round(place)]
        return min(inside, key=lambda start: abs(start - place))

    def windows(self, span: int, generator: random.Random) -> Iterator[int]:
        """Where windows begin, each once: first such that do not overlap."""
        for shift in _SHIFTS:
            begins = list(range(int(shift * span), len(self.tokens) - span + 1, span))
            generator.shuffle(begins)
            yield from begins


def _texts(wanted: Wanted, name: str, text: str) -> Iterator[Sample]:
    """Windows of a text, each with the tokens that follow it."""
    prose, first = _Prose(wanted.tokenizer, text), leading_tokens(wanted.tokenizer)
    body = wanted.length - len(first)
    begins = prose.windows(body + wanted.tokens, wanted.generator(name))
    for index, begin in enumerate(begins):
        end = begin + body
        prompt = [*first, *prose.tokens[begin:end]]
        yield Sample(name, index, prompt, prose.tokens[end : end + wanted.tokens], (), "text")


def _wikitext(wanted: Wanted) -> Iterator[Sample]:
    return _texts(wanted, "wikitext", wikitext())


def _built_in() -> str:
    """The part of Python's reference that training leaves out."""
    return reference_text(SHOWN)[:SHOWN]


def _prose(wanted: Wanted) -> Iterator[Sample]:
    return _texts(wanted, "prose", _built_in())


def _niah(wanted: Wanted) -> Iterator[Sample]:
    """A number in prose, asked for at the end; WikiText where there is a folder of data."""
    text = _built_in() if data_folder() is None else wikitext()
    prose, generator = _Prose(wanted.tokenizer, text), wanted.generator("niah")
    phase = generator.random()
    for index, begin in enumerate(prose.windows(wanted.length, generator)):
        own = wanted.generator("niah", index)
        subject = f"{own.choice(_NUMBERS)} {own.choice(_PLACES)}"
        number = "".join(own.sample("123456789", 7))
        needle = encode(wanted.tokenizer, f" For the record, the {subject} is {number}.")
        question = f"What is the {subject}?"
        room = _room(wanted, question) - len(needle)
        if room < wanted.length // 4:
            return
        depth = (phase + index * _GOLDEN) % 1
        place = prose.sentence_near(begin + depth * room, begin, begin + room)
        before, after = prose.tokens[begin:place], prose.tokens[place : begin + room]
        prompt = _prompt(wanted, [*before, *needle, *after], question)
        yield Sample("niah", index, prompt, None, (number,), "task")


def _hotpotqa(wanted: Wanted) -> Iterator[Sample]:
    """A question, with its evidence among that of other questions; only those that fit."""
    rows = questions()
    lines = {line: encode(wanted.tokenizer, f"{line}\n") for row in rows for line in row.evidence}
    order = list(range(len(rows)))
    wanted.generator("hotpotqa").shuffle(order)
    index = 0
    for row in (rows[number] for number in order):
        own = wanted.generator("hotpotqa", row.question)
        question = f"{row.question}\nReply with the answer alone, a few words."
        room = _room(wanted, question) - sum(len(lines[line]) for line in row.evidence)
        if room < 0:
            continue
        others = [line for line in lines if line not in row.evidence]
        chosen = [*row.evidence, *_fill(own, others, room, lines)]
        own.shuffle(chosen)
        prompt = _prompt(wanted, chain.from_iterable(lines[line] for line in chosen), question)
        yield Sample("hotpotqa", index, prompt, None, (row.answer,), "task")
        index += 1


def _gsm8k(wanted: Wanted) -> Iterator[Sample]:
    """A problem after worked ones; only those that leave room for one."""
    every = problems()
    asked, shown = every[:-EXEMPLARS], every[-EXEMPLARS:]
    worked = {
        text: encode(wanted.tokenizer, text)
        for text in (f"Q: {p.question}\nA: {p.worked}\nThe answer is {p.result}.\n" for p in shown)
    }
    wanted.generator("gsm8k").shuffle(asked)
    index = 0
    for problem in asked:
        own = wanted.generator("gsm8k", problem.question)
        question = f"Q: {problem.question}\nWork it out like the others, up to the answer."
        chosen = _fill(own, worked, _room(wanted, question), worked)
        if not chosen:
            continue
        prompt = _prompt(wanted, chain.from_iterable(worked[text] for text in chosen), question)
        yield Sample("gsm8k", index, prompt, None, (problem.result,), "task")
        index += 1


def _fill(
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


def _prompt(wanted: Wanted, tokens: Iterable[int], question: str) -> list[int]:
    """A document and a question in the chat template, or in plain text where there is none."""
    prompt = build_prompt(wanted.tokenizer, Document("", list(tokens), question))
    return [*prompt.document, *prompt.question]


def _room(wanted: Wanted, question: str) -> int:
    """Tokens that a document may have."""
    return wanted.length - len(_prompt(wanted, (), question))


def _register(sets: Sequence[tuple[str, SampleSet]]) -> None:
    for name, each in sets:
        SETS.register(name, each)


_register(
    [
        ("wikitext", SampleSet("text", _wikitext, WIKITEXT)),
        ("hotpotqa", SampleSet("task", _hotpotqa, HOTPOTQA)),
        ("niah", SampleSet("task", _niah)),
        ("gsm8k", SampleSet("task", _gsm8k, GSM8K, ends_with_number)),
        ("prose", SampleSet("text", _prose)),
    ]
)
