"""Variable tracking after RULER (arXiv 2404.06654): who has the value, through whom.

A chain of variables hands a value on: the first is given it, each other one the variable before it.
The statements stand in order in a text that says nothing, and all variables of one chain are asked
for by their value. `hops` is how often the value is handed on, so a chain has `hops + 1` variables;
RULER's own choice is one chain of four hops, told after a worked example.

Departures: words and sentences are ours; statements stand at even distances, those of several
chains mixed at random; the example is left out of prompts below `EXAMPLE_FROM` tokens.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from kvfold.evaluation.needles import Riddle, draw_riddles
from kvfold.evaluation.ruler import NOISE, noise
from kvfold.evaluation.sample import Sample, Wanted, distinct

EXAMPLE_FROM = 1536
"""Tokens of a prompt from which on a worked example stands before what is asked."""

_PREFACE = (
    "Variables are given values in the text below, some of them the value of another one.\n\n"
)


def draw_tracking(name: str, wanted: Wanted, *, chains: int, hops: int) -> Iterator[Sample]:
    """Chains of variables in a text that says nothing.

    Args:
        name: Of the set.
        wanted: What they are made for.
        chains: How many; one of them is asked for.
        hops: How often each hands its value on.

    Yields:
        Samples whose prompts have the exact length; none where there is too little room.
    """
    shown = wanted.length >= EXAMPLE_FROM
    invent = partial(tracking, chains=chains, hops=hops, with_example=shown)
    return draw_riddles(name, invent, wanted, stretches=noise)


def tracking(
    own: random.Random, text: str, *, chains: int, hops: int, with_example: bool
) -> Riddle:
    """Invent chains, and ask for the variables of the first.

    Args:
        own: Chooses.
        text: Has neither digits nor capital letters in a row.
        chains: How many.
        hops: How often each hands its value on.
        with_example: Whether a chain of as many hops is shown with its answer before.
    """
    size = hops + 1
    names, values = _names(own, (chains + 1) * size), _values(own, chains + 1)
    told = [names[size * at : size * (at + 1)] for at in range(chains + 1)]
    (*hidden, shown), (*given, value) = told, values
    statements = map(_statements, hidden, given)
    example = f"{_example(shown, value)}\n\n{_PREFACE}" if with_example else ""
    return Riddle(
        needles=tuple(_merged(own, statements)),
        question=_question(given[0], size),
        expected=tuple(hidden[0]),
        opening=_opening(given[0]),
        preface=f"{_PREFACE}{example}",
        in_order=True,
    )


def _statements(names: Sequence[str], value: str) -> list[str]:
    """A chain's assignments."""
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    return [f" VAR {name} = {source}." for name, source in zip(names, sources, strict=True)]


def _merged(own: random.Random, chains: Iterable[list[str]]) -> Iterator[str]:
    """All statements in random order, but those of each chain in theirs."""
    told = list(chains)
    turns = [at for at, chain in enumerate(told) for _ in chain]
    own.shuffle(turns)
    left = list(map(iter, told))
    return (next(left[at]) for at in turns)


def _example(names: Sequence[str], value: str) -> str:
    """A short text with one chain, its question and its answer."""
    text = "".join(_statements(names, value)).strip()
    question = _question(value, len(names))
    return f"{text} {NOISE}\n\n{question}\n{_opening(value)} {', '.join(names)}."


def _question(value: str, count: int) -> str:
    return (
        f"Which {count} variables have the value {value} in the text above, be it directly or "
        "through others?"
    )


def _opening(value: str) -> str:
    return f"The variables that have the value {value} are:"


def _names(own: random.Random, count: int) -> tuple[str, ...]:
    """Different names of five capital letters."""
    return distinct(count, lambda: "".join(own.choices(string.ascii_uppercase, k=5)))


def _values(own: random.Random, count: int) -> list[str]:
    """Different numbers of five digits."""
    return list(map(str, own.sample(range(10_000, 100_000), count)))
