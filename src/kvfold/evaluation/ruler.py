"""Needles after RULER (arXiv 2404.06654): what is hidden, in what, and how much of it is asked for.

RULER hides sentences that give a key one or several values, and asks for all values of one or of
several keys. Its eight variants differ in the text round them and in what keys and values look
like:

================== ========================== ========== ======= ==========================
set                text                       key        value   hidden, asked for
================== ========================== ========== ======= ==========================
ruler-single-1     a few sentences, repeated  two words  number  one, one
ruler-single-2     prose                      two words  number  one, one
ruler-single-3     prose                      two words  UUID    one, one
ruler-multikey-1   prose                      two words  number  four keys, one
ruler-multikey-2   sentences of other keys    two words  number  as many as fit, one
ruler-multikey-3   sentences of other keys    UUID       UUID    as many as fit, one
ruler-multivalue   prose                      two words  number  four of one key, all
ruler-multiquery   prose                      two words  number  four keys, all
================== ========================== ========== ======= ==========================

Departures: all words and sentences are ours; the prose is WikiText's, or that of Python's reference
where no folder of data is named, in place of essays; several needles stand at even distances from
one another, not anywhere; a prompt has exactly the length asked for, its answer not included;
answers are compared word by word, where RULER is content with a part of a word.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from uuid import UUID

from kvfold.evaluation.needles import Haystack, Riddle, draw_numbers, draw_riddles
from kvfold.evaluation.prose import Prose, haystack
from kvfold.evaluation.ruler_words import PAIRS, draw_keys
from kvfold.evaluation.sample import Sample, Wanted, distinct

Draw = Callable[[random.Random, str, int], tuple[str, ...]]
"""Chooses so many different keys or values that do not stand in a text."""

NOISE = (
    "The road is long. The rain is soft. A door stands open. Someone hums a tune. "
    "Then all is quiet again."
)
"""What is repeated where there is nothing to read."""
_CHARACTERS = 32
"""Of prose for each token of a prompt; English takes about four."""
_LEAST = 12
"""Tokens that a sentence with a key and its value has at least."""


def draw_uuids(own: random.Random, text: str, count: int) -> tuple[str, ...]:
    """Random UUIDs that do not stand in a text."""
    return distinct(count, lambda: str(UUID(int=own.getrandbits(128), version=4)), text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needles:
    """What is hidden, and how much of it is asked for."""

    keys: int = 1
    """How many."""
    values: int = 1
    """Of each key."""
    asked: int = 1
    """Keys that are asked for, with all their values."""
    key: Draw = draw_keys
    """Chooses keys."""
    value: Draw = draw_numbers
    """Chooses values."""
    noun: str = "number"
    """What a value is called."""
    among: Haystack | None = None
    """What they are hidden in; sentences of other keys without it."""

    def riddle(self, own: random.Random, text: str) -> Riddle:
        """Invent keys and values.

        Args:
            own: Chooses.
            text: That gives none of them away.
        """
        keys = self.key(own, text, self.keys)
        values = self.value(own, text, self.keys * self.values)
        pairs = [(keys[at // self.values], value) for at, value in enumerate(values)]
        asked, expected = keys[: self.asked], values[: self.asked * self.values]
        named = _listed(asked)
        if len(expected) == 1:
            question = f"What is the secret {self.noun} of {named} in the text above?"
            opening = f"The secret {self.noun} of {named} in the text is"
        else:
            question = f"What are all the secret {self.noun}s of {named} in the text above?"
            opening = f"The secret {self.noun}s of {named} in the text are"
        return Riddle(
            needles=tuple(self.sentence(key, value) for key, value in pairs),
            question=question,
            expected=expected,
            opening=opening,
            preface=f"The text below tells secret {self.noun}s. Keep them in mind: you will be "
            "asked for them at its end.\n\n",
        )

    def sentence(self, key: str, value: str) -> str:
        """How a text tells a value of a key."""
        return f" A secret {self.noun} of {key} is: {value}."

    def others(self, wanted: Wanted, generator: random.Random) -> Iterator[tuple[Prose, int]]:
        """Texts of nothing but such sentences, one a sample."""
        while True:
            count = min(wanted.length // _LEAST + 1, PAIRS // 2)
            keys, values = self.key(generator, "", count), self.value(generator, "", count)
            prose = Prose(wanted.tokenizer, "".join(map(self.sentence, keys, values)))
            if len(prose.tokens) < wanted.length:
                return
            yield prose, 0


def draw_needles(name: str, wanted: Wanted) -> Iterator[Sample]:
    """Samples of one variant.

    Args:
        name: One of `VARIANTS`.
        wanted: What they are made for.

    Yields:
        Samples whose prompts have the exact length; none where there is too little room for text.
    """
    needles = VARIANTS[name]
    among = needles.others if needles.among is None else needles.among
    return draw_riddles(name, needles.riddle, wanted, stretches=among)


def essays(wanted: Wanted, generator: random.Random) -> Iterator[tuple[Prose, int]]:
    """Stretches of prose from any sentence on; it begins anew where it is too short."""
    return _stretches(haystack()[: _CHARACTERS * wanted.length], wanted, generator)


def noise(wanted: Wanted, generator: random.Random) -> Iterator[tuple[Prose, int]]:
    """The same few sentences over and over, from any of them on."""
    return _stretches(NOISE, wanted, generator)


def _stretches(text: str, wanted: Wanted, generator: random.Random) -> Iterator[tuple[Prose, int]]:
    prose = Prose(wanted.tokenizer, text)
    times = 1 + 2 * wanted.length // len(prose.tokens)
    if times > 1:
        prose = Prose(wanted.tokenizer, " ".join([text] * times))
    last = len(prose.tokens) - wanted.length
    begins = [begin for begin in prose.starts if begin <= last]
    while True:
        yield prose, generator.choice(begins)


def _listed(keys: Sequence[str]) -> str:
    *rest, last = keys
    return f"{', '.join(rest)} and {last}" if rest else last


VARIANTS: dict[str, Needles] = {
    "ruler-single-1": Needles(among=noise),
    "ruler-single-2": Needles(among=essays),
    "ruler-single-3": Needles(among=essays, value=draw_uuids, noun="code"),
    "ruler-multikey-1": Needles(among=essays, keys=4),
    "ruler-multikey-2": Needles(),
    "ruler-multikey-3": Needles(key=draw_uuids, value=draw_uuids, noun="code"),
    "ruler-multivalue": Needles(among=essays, values=4),
    "ruler-multiquery": Needles(among=essays, keys=4, asked=4),
}
"""By name, as in the table above."""
