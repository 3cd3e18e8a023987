"""Whether an answer is right, and what is wrong with one that is not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from statistics import fmean
from typing import Literal

Fault = Literal["repetitive", "overlength", "wrong"]
"""Goes round in circles; does not come to its end where the full cache did; anything else."""
FAULTS: tuple[Fault, ...] = ("repetitive", "overlength", "wrong")
"""In the order in which they are looked for."""

_GRAM, _TIMES = 4, 4
"""An answer is repetitive when so many tokens in a row stand in it so often."""
_LOOP, _ROUNDS = 12, 3
"""Or when its last tokens, at least so many, are the same so often over."""


def contains_one(expected: Iterable[str], answer: str) -> bool:
    """Whether an answer has one of some words or numbers, whole and in any case of letters."""
    text = _plain(answer)
    return any(
        re.search(rf"(?<!\w){re.escape(_plain(each))}(?!\w)", text) is not None for each in expected
    )


def contains_all(expected: Iterable[str], answer: str) -> bool:
    """Whether an answer has every one of some words or numbers; see `contains_one`."""
    return found_share(expected, answer) == 1


def found_share(expected: Iterable[str], answer: str) -> float:
    """The share of some words or numbers, one at least, that an answer has."""
    return fmean(contains_one((each,), answer) for each in expected)


def words_in_common(expected: str, answer: str) -> float:
    """F1 of the words of an answer, from 0 to 1, however they are ordered and punctuated."""
    wanted, found = (Counter(re.findall(r"\w+", _plain(text))) for text in (expected, answer))
    common = (wanted & found).total()
    return 2 * common / (sum(wanted.values()) + sum(found.values())) if common else 0.0


def ends_with_number(expected: Iterable[str], answer: str) -> bool:
    """Whether the last number of an answer is one of some."""
    last = last_number(answer)
    return last is not None and any(_value(each) == last for each in expected)


def begins_with_number(expected: Iterable[str], answer: str) -> bool:
    """Whether the first number of an answer is one of some, whatever it goes on with."""
    first = next(iter(_numbers(answer)), None)
    return first is not None and any(_value(each) == first for each in expected)


def last_number(answer: str) -> Decimal | None:
    """The last number that stands in a text; None where there is none."""
    return next(iter(_numbers(answer)[::-1]), None)


def _numbers(answer: str) -> list[Decimal | None]:
    found = re.findall(r"(?:(?<![\w)])-)?\d+(?:,\d{3})*(?:\.\d+)?", answer)
    return [_value(each) for each in found]


def before_stop(answer: str, stops: Iterable[str]) -> str:
    """An answer up to the first of some strings; blanks stay as they are."""
    place = stop_place(answer, stops)
    blanks = len(answer) - len(answer.lstrip())
    return answer if place is None else answer[: blanks + place]


def stop_place(answer: str, stops: Iterable[str]) -> int | None:
    """Where the first of some strings stands in an answer without its leading blanks.

    One at the very beginning ends nothing. None where there is no other.
    """
    text = answer.lstrip()
    return min((place for each in stops if (place := text.find(each, 1)) > 0), default=None)


def find_fault(
    tokens: Sequence[int], *, is_right: bool, is_cut: bool, full_is_cut: bool
) -> Fault | None:
    """What is wrong with an answer.

    Args:
        tokens: The answer.
        is_right: Whether it is right.
        is_cut: Whether it stopped at the most tokens allowed.
        full_is_cut: Whether the full cache's answer did.

    Returns:
        None for a right answer.
    """
    if is_right:
        return None
    if is_repetitive(tokens):
        return "repetitive"
    return "overlength" if is_cut and not full_is_cut else "wrong"


def is_repetitive(tokens: Sequence[int]) -> bool:
    """Whether an answer says the same over and over, or ends in a loop."""
    grams = Counter(zip(*(tokens[start:] for start in range(_GRAM)), strict=False))
    if grams and max(grams.values()) >= _TIMES:
        return True
    return any(
        _looped(tokens, period) >= max(_LOOP, _ROUNDS * period)
        for period in range(1, len(tokens) // _ROUNDS + 1)
    )


def _looped(tokens: Sequence[int], period: int) -> int:
    """How many last tokens repeat those a period before, these included."""
    count = 0
    for at in range(len(tokens) - 1, period - 1, -1):
        if tokens[at] != tokens[at - period]:
            break
        count += 1
    return count + period


def _plain(text: str) -> str:
    """Lower case, single blanks, no quotation marks, and numbers without commas."""
    unquoted = re.sub(r"[\"“”]", "", text.casefold())
    return " ".join(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", unquoted).split())


def _value(number: str) -> Decimal | None:
    try:
        return Decimal(number.replace(",", ""))
    except InvalidOperation:
        return None
