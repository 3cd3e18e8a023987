"""Many-shot arithmetic: sums of two numbers after as many worked ones as there is room for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, count

from kvfold.evaluation.sample import Sample, Wanted, task
from kvfold.text import encode

_NUMBERS = range(10, 100)


def draw_sums(name: str, wanted: Wanted) -> Iterator[Sample]:
    """Sums that are not among the worked ones, in either order.

    Args:
        name: Of the set.
        wanted: What they are made for.

    Yields:
        Samples; none where there is no room for a worked sum.
    """
    for index in count():
        own = wanted.generator(name, index)
        first, second = own.sample(_NUMBERS, 2)
        question = f"Go on in the same way: {first} + {second}"
        opening = f"{first} + {second} ="
        shots = list(_shots(own, {first, second}, wanted, wanted.room(question, opening)))
        if not shots:
            return
        prompt = wanted.prompt(chain.from_iterable(shots), question, opening)
        yield task(name, index, prompt, (str(first + second),))


def _shots(own: random.Random, asked: set[int], wanted: Wanted, room: int) -> Iterator[list[int]]:
    """Tokens of worked sums, up to the first that does not fit."""
    while True:
        first, second = own.choices(_NUMBERS, k=2)
        if {first, second} == asked:
            continue
        shot = encode(wanted.tokenizer, f"{first} + {second} = {first + second}\n")
        room -= len(shot)
        if room < 0:
            return
        yield shot
