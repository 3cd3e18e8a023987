"""Arithmetic problems in words with their solutions, step by step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvfold.training.words import FORENAMES, GOODS, TOWNS, Split, words_of


@dataclass(frozen=True, slots=True)
class Problem:
    """A question whose answer is a whole number."""

    story: str
    """What is told and asked."""
    steps: tuple[str, ...]
    """Sentences that lead to the result."""
    result: int
    """The answer."""


class Cast:
    """Draws names and numbers for one problem.

    Attributes:
        names: Two people.
        goods: Two sorts of things that are counted.
        towns: Two towns.
    """

    def __init__(self, generator: random.Random, split: Split) -> None:
        self._generator = generator
        self.names = generator.sample(words_of(FORENAMES, split), 2)
        self.goods = generator.sample(words_of(GOODS, split), 2)
        self.towns = generator.sample(words_of(TOWNS, split), 2)

    def number(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`."""
        return self._generator.randint(low, high)


def draw_problem(generator: random.Random, split: Split) -> Problem:
    """A problem of any kind.

    Args:
        generator: Chooses.
        split: Whose names and things it is made of.
    """
    return generator.choice(KINDS)(Cast(generator, split))


def draw_sum(generator: random.Random) -> tuple[str, str]:
    """A bare calculation and its result, for prompts too short for words."""
    left, right = generator.randint(11, 99), generator.randint(2, 99)
    if generator.random() < 0.5:
        return f"{left} + {right} =", f"{left + right}"
    return f"{left + right} - {right} =", f"{left}"


def _purchase(cast: Cast) -> Problem:
    (name, _), (first, second) = cast.names, cast.goods
    count, price = cast.number(3, 12), cast.number(2, 9)
    others, cost = cast.number(2, 8), cast.number(3, 15)
    left, right = count * price, others * cost
    note = left + right + cast.number(1, 40)
    return Problem(
        f"{name} chooses {count} {first} for {price} crowns each and {others} {second} for {cost} "
        f"crowns each, and pays with {note} crowns. How much change is due?",
        (
            f"The {first} cost {count} * {price} = {left}.",
            f"The {second} cost {others} * {cost} = {right}.",
            f"Together that makes {left} + {right} = {left + right}.",
            f"The change is {note} - {left + right} = {note - left - right}.",
        ),
        note - left - right,
    )


def _packing(cast: Cast) -> Problem:
    (name, _), (goods, _) = cast.names, cast.goods
    boxes, each, loose = cast.number(4, 18), cast.number(5, 25), cast.number(2, 30)
    broken = cast.number(1, 4)
    full = boxes * each
    return Problem(
        f"A shelf holds {boxes} boxes with {each} {goods} in each, and {loose} loose {goods}. "
        f"{name} throws away {broken} from every box. How many {goods} remain?",
        (
            f"At first the boxes hold {boxes} * {each} = {full} {goods}.",
            f"With the loose ones there are {full} + {loose} = {full + loose}.",
            f"Thrown away are {boxes} * {broken} = {boxes * broken}.",
            f"There remain {full + loose} - {boxes * broken} = {full + loose - boxes * broken}.",
        ),
        full + loose - boxes * broken,
    )


def _sharing(cast: Cast) -> Problem:
    (name, other), (goods, _) = cast.names, cast.goods
    people, share, kept = cast.number(3, 9), cast.number(4, 20), cast.number(2, 15)
    total = people * share + kept
    own = share + kept
    return Problem(
        f"{name} has {total} {goods}, puts {kept} aside, and divides what is left evenly among "
        f"{people} people, {name} and {other} among them. How many {goods} does {name} have in "
        "the end?",
        (
            f"To be divided are {total} - {kept} = {total - kept}.",
            f"Each gets {total - kept} / {people} = {share}.",
            f"Counting those put aside, {name} has {share} + {kept} = {own}.",
        ),
        own,
    )


def _journey(cast: Cast) -> Problem:
    (name, _), (here, there) = cast.names, cast.towns
    fast, slow = cast.number(40, 90), cast.number(10, 35)
    hours, more = cast.number(2, 6), cast.number(1, 5)
    first, second = fast * hours, slow * more
    return Problem(
        f"From {here}, {name} drives {hours} hours at {fast} kilometres an hour, then cycles "
        f"{more} hours at {slow} kilometres an hour and arrives in {there}. How many kilometres "
        "was the way there and back?",
        (
            f"By car it is {hours} * {fast} = {first} kilometres.",
            f"By bicycle it is {more} * {slow} = {second} kilometres.",
            f"One way is {first} + {second} = {first + second} kilometres.",
            f"There and back it is 2 * {first + second} = {2 * (first + second)}.",
        ),
        2 * (first + second),
    )


def _wages(cast: Cast) -> Problem:
    name, other = cast.names
    pay, days, bonus = cast.number(30, 120), cast.number(3, 12), cast.number(10, 80)
    rent = cast.number(20, 80)
    earned = pay * days
    return Problem(
        f"{name} earns {pay} crowns a day and works {days} days, gets {bonus} crowns on top, and "
        f"gives {rent} crowns to {other}. How many crowns does {name} keep?",
        (
            f"The work brings {pay} * {days} = {earned} crowns.",
            f"With what comes on top it is {earned} + {bonus} = {earned + bonus}.",
            f"After giving there are {earned + bonus} - {rent} = {earned + bonus - rent}.",
        ),
        earned + bonus - rent,
    )


def _ages(cast: Cast) -> Problem:
    name, other = cast.names
    age, factor, years = cast.number(4, 16), cast.number(2, 4), cast.number(3, 20)
    older = age * factor
    total = older + age + 2 * years
    return Problem(
        f"{other} is {age} years old and {name} is {factor} times as old. What will their ages "
        f"add up to in {years} years?",
        (
            f"{name} is {factor} * {age} = {older}.",
            f"Now the ages add up to {older} + {age} = {older + age}.",
            f"Both grow older, which adds 2 * {years} = {2 * years}.",
            f"They will add up to {older + age} + {2 * years} = {total}.",
        ),
        total,
    )


def _harvest(cast: Cast) -> Problem:
    (name, other), (goods, _), (town, _) = cast.names, cast.goods, cast.towns
    monday, more, price = cast.number(15, 60), cast.number(5, 30), cast.number(2, 7)
    tuesday = monday + more
    both = monday + tuesday
    return Problem(
        f"On Monday {name} sells {monday} {goods} at the market of {town}; on Tuesday {other} "
        f"sells {more} more than that. Each goes for {price} crowns. What do they take in?",
        (
            f"On Tuesday {monday} + {more} = {tuesday} {goods} are sold.",
            f"On both days it is {monday} + {tuesday} = {both}.",
            f"They take in {both} * {price} = {both * price} crowns.",
        ),
        both * price,
    )


def _reading(cast: Cast) -> Problem:
    name, other = cast.names
    rate, days, faster = cast.number(8, 40), cast.number(3, 9), cast.number(2, 3)
    rest = cast.number(10, 90)
    read = rate * days + rate * faster * days
    return Problem(
        f"{name} copies {rate} pages a day and {other} copies {faster} times as many. After {days} "
        f"days {rest} pages of the manuscript are missing. How many pages does it have?",
        (
            f"{other} copies {faster} * {rate} = {rate * faster} pages a day.",
            f"Together they copy {rate} + {rate * faster} = {rate * (1 + faster)} a day.",
            f"In {days} days it is {days} * {rate * (1 + faster)} = {read}.",
            f"The manuscript has {read} + {rest} = {read + rest} pages.",
        ),
        read + rest,
    )


def _trade(cast: Cast) -> Problem:
    (name, other), (first, second) = cast.names, cast.goods
    rate, given, kept = cast.number(2, 6), cast.number(3, 14), cast.number(4, 30)
    lost = cast.number(1, 3)
    got = rate * given
    return Problem(
        f"{name} gives {other} {given} {first} and gets {rate} {second} for each. {name} had "
        f"{kept} {second} before and loses {lost} on the way. How many {second} does {name} have?",
        (
            f"For the {first} there are {given} * {rate} = {got} {second}.",
            f"With those from before it is {got} + {kept} = {got + kept}.",
            f"After the loss it is {got + kept} - {lost} = {got + kept - lost}.",
        ),
        got + kept - lost,
    )


def _tank(cast: Cast) -> Problem:
    (name, _), (town, _) = cast.names, cast.towns
    inflow, outflow, hours = cast.number(30, 90), cast.number(5, 28), cast.number(3, 12)
    start = cast.number(10, 200)
    net = inflow - outflow
    return Problem(
        f"The cistern of {town} holds {start} litres when {name} opens the tap. Every hour "
        f"{inflow} litres run in and {outflow} leak out. How many litres does it hold after "
        f"{hours} hours?",
        (
            f"Every hour it gains {inflow} - {outflow} = {net} litres.",
            f"In {hours} hours it gains {hours} * {net} = {hours * net}.",
            f"Then it holds {start} + {hours * net} = {start + hours * net} litres.",
        ),
        start + hours * net,
    )


KINDS: tuple[Callable[[Cast], Problem], ...] = (
    _purchase,
    _packing,
    _sharing,
    _journey,
    _wages,
    _ages,
    _harvest,
    _reading,
    _trade,
    _tank,
)
"""All kinds of problems."""
