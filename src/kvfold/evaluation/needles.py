"""Needles in a haystack: numbers hidden in prose, asked for at its end.

One number is hidden (`niah`), several of which one is asked for by its key (`niah-multikey`), or
several of one key that are all asked for (`niah-multivalue`), as in RULER (arXiv 2404.06654).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvfold.evaluation.prose import Prose, haystack
from kvfold.evaluation.sample import Sample, Wanted, distinct, task
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
    """What is asked for."""
    opening: str = ""
    """With what the answer begins."""
    preface: str = ""
    """What the document begins with."""
    in_order: bool = False
    """Whether the sentences have to stand in their order; no one depth is theirs then."""


Haystack = Callable[[Wanted, random.Random], Iterator[tuple[Prose, int]]]
"""Stretches that needles are hidden in, one a sample: a text, and the token at which each begins;
at least as many tokens follow as a prompt has."""


def single(own: random.Random, text: str) -> Riddle:
    """One number."""
    subject = f"{own.choice(_NUMBERS)} {own.choice(_PLACES)}"
    (number,) = draw_numbers(own, text, 1)
    return Riddle(
        needles=(f" For the record, the {subject} is {number}.",),
        question=f"What is the {subject}?",
        expected=(number,),
    )


def multikey(own: random.Random, text: str) -> Riddle:
    """Numbers of several keys, one of which is asked for."""
    keys, numbers = own.sample(_PLACES, KEYS), draw_numbers(own, text, KEYS)
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
    key, numbers = own.choice(_PLACES), draw_numbers(own, text, VALUES)
    return Riddle(
        needles=tuple(
            f" One of the special magic numbers for {key} is: {number}." for number in numbers
        ),
        question=f"What are the {VALUES} special magic numbers for {key} mentioned in the text? "
        f"Reply with the {VALUES} numbers alone.",
        expected=numbers,
        opening=f"The special magic numbers for {key} are ",
    )


def windows(wanted: Wanted, generator: random.Random) -> Iterator[tuple[Prose, int]]:
    """Windows of prose, each once."""
    prose = Prose(wanted.tokenizer, haystack())
    for begin in prose.windows(wanted.length, generator):
        yield prose, begin


def draw_riddles(
    name: str,
    invent: Callable[[random.Random, str], Riddle],
    wanted: Wanted,
    *,
    stretches: Haystack = windows,
) -> Iterator[Sample]:
    """Riddles in stretches of a text.

    Args:
        name: Of the set.
        invent: Makes a riddle that no number of a text gives away.
        wanted: What they are made for.
        stretches: Where they are hidden.

    Yields:
        Samples whose prompts have the exact length; none where there is too little room for text.
    """
    generator = wanted.generator(name)
    phase = generator.random()
    for index, (prose, begin) in enumerate(stretches(wanted, generator)):
        riddle = invent(wanted.generator(name, index), prose.text)
        preface = encode(wanted.tokenizer, riddle.preface)
        needles = [encode(wanted.tokenizer, each) for each in riddle.needles]
        taken = len(preface) + sum(map(len, needles))
        room = wanted.room(riddle.question, riddle.opening) - taken
        if room < wanted.length // 4:
            return
        depth = wanted.depth(index, phase)
        depths = _spread(depth, len(needles), in_order=riddle.in_order)
        hidden = _hide(prose, (begin, begin + room), needles, depths)
        prompt = wanted.prompt([*preface, *hidden], riddle.question, riddle.opening)
        named = None if wanted.depths is None or riddle.in_order else depth
        yield task(name, index, prompt, riddle.expected, depth=named)


def _spread(depth: float, count: int, *, in_order: bool) -> list[float]:
    """The depth of the first needle, and others at even distances from it, round the end.

    Those that stand in order have the same depths, from the least to the greatest.
    """
    depths = [depth, *((depth + at / count) % 1 for at in range(1, count))]
    return sorted(depths) if in_order else depths


def _hide(
    prose: Prose, window: tuple[int, int], needles: Sequence[list[int]], depths: Sequence[float]
) -> list[int]:
    """Put each needle where a sentence begins, as near to its depth as possible."""
    begin, end = window
    places = [prose.sentence_near(begin + each * (end - begin), begin, end) for each in depths]
    document, done = [], begin
    for place, needle in sorted(zip(places, needles, strict=True), key=lambda pair: pair[0]):
        document += [*prose.tokens[done:place], *needle]
        done = place
    return [*document, *prose.tokens[done:end]]


def draw_numbers(own: random.Random, text: str, count: int) -> tuple[str, ...]:
    """Different numbers of seven digits, none twice in one, that do not stand in a text."""
    return distinct(count, lambda: "".join(own.sample("123456789", 7)), text)
