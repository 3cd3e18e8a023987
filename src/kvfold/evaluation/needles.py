"""Needles in a haystack: numbers hidden in prose, asked for at its end.

One number is hidden (`niah`), several of which one is asked for by its key (`niah-multikey`), or
several of one key that are all asked for (`niah-multivalue`), as in RULER (arXiv 2404.06654).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvfold.evaluation.prose import Prose, haystack
from kvfold.evaluation.sample import Sample, Wanted, task
from kvfold.text import encode

KEYS, VALUES = 4, 3
"""Needles of `niah-multikey`, and of `niah-multivalue`."""

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
class Riddle:
    """What is hidden, and what is asked."""

    needles: tuple[str, ...]
    """Sentences, the one that is asked for first."""
    question: str
    """What is asked."""
    expected: tuple[str, ...]
    """The numbers that are asked for."""
    opening: str = ""
    """With what the answer begins."""


def single(own: random.Random, text: str) -> Riddle:
    """One number."""
    subject = f"{own.choice(_NUMBERS)} {own.choice(_PLACES)}"
    (number,) = _numbers(own, text, 1)
    return Riddle(
        needles=(f" For the record, the {subject} is {number}.",),
        question=f"What is the {subject}?",
        expected=(number,),
    )


def multikey(own: random.Random, text: str) -> Riddle:
    """Numbers of several keys, one of which is asked for."""
    keys, numbers = own.sample(_PLACES, KEYS), _numbers(own, text, KEYS)
    return Riddle(
        needles=tuple(
            f" The special magic number for {key} is {number}."
            for key, number in zip(keys, numbers, strict=True)
        ),
        question=f"What is the special magic number for {keys[0]} mentioned in the text?",
        expected=numbers[:1],
        opening=f"The special magic number for {keys[0]} mentioned in the text is",
    )


def multivalue(own: random.Random, text: str) -> Riddle:
    """Several numbers of one key, all asked for."""
    key, numbers = own.choice(_PLACES), _numbers(own, text, VALUES)
    return Riddle(
        needles=tuple(
            f" One of the special magic numbers for {key} is: {number}." for number in numbers
        ),
        question=f"What are the {VALUES} special magic numbers for {key} mentioned in the text? "
        f"Reply with the {VALUES} numbers alone.",
        expected=numbers,
        opening=f"The special magic numbers for {key} are ",
    )


def draw_riddles(
    name: str, invent: Callable[[random.Random, str], Riddle], wanted: Wanted
) -> Iterator[Sample]:
    """Riddles in windows of prose, each window once.

    Args:
        name: Of the set.
        invent: Makes a riddle that no number of a text gives away.
        wanted: What they are made for.

    Yields:
        Samples whose prompts have the exact length; none where there is too little room for prose.
    """
    prose, generator = Prose(wanted.tokenizer, haystack()), wanted.generator(name)
    phase = generator.random()
    for index, begin in enumerate(prose.windows(wanted.length, generator)):
        riddle = invent(wanted.generator(name, index), prose.text)
        needles = [encode(wanted.tokenizer, each) for each in riddle.needles]
        room = wanted.room(riddle.question, riddle.opening) - sum(map(len, needles))
        if room < wanted.length // 4:
            return
        depth = wanted.depth(index, phase)
        document = _hide(prose, (begin, begin + room), needles, depth)
        prompt = wanted.prompt(document, riddle.question, riddle.opening)
        named = depth if wanted.depths is not None else None
        yield task(name, index, prompt, riddle.expected, depth=named)


def _hide(
    prose: Prose, window: tuple[int, int], needles: Sequence[list[int]], depth: float
) -> list[int]:
    """Put the first needle at its depth, the others at even distances from it, round the end."""
    begin, end = window
    depths = [depth, *((depth + at / len(needles)) % 1 for at in range(1, len(needles)))]
    places = [prose.sentence_near(begin + each * (end - begin), begin, end) for each in depths]
    document, done = [], begin
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
        document += [*prose.tokens[done:place], *needle]
        done = place
    return [*document, *prose.tokens[done:end]]


def _numbers(own: random.Random, text: str, count: int) -> tuple[str, ...]:
    """Different numbers of seven digits, none twice in one, that do not stand in a text."""
    found: list[str] = []
    while len(found) < count:
        number = "".join(own.sample("123456789", 7))
        if number not in text and number not in found:
            found.append(number)
    return tuple(found)
