"""Common and frequent words after RULER (arXiv 2404.06654): which stand most often in a list.

Common words (`ruler-cwe`): a numbered list in random order has ten words often and many others
seldom, and the ten are asked for. RULER's counts are 30 and 3, below 4096 tokens 6 and 1; a worked
example with 3 and 1 stands before. Frequent words (`ruler-fwe`): coded words whose counts follow a
zeta distribution, the word of rank k standing `floor(N k^-2 / zeta(2))` times among N; rank 1 is
noise, and the three after it are asked for.

Departures: words and sentences are ours; compounds of two nouns stand in where single words run
out; the example is left out of prompts below `EXAMPLE_FROM` tokens, and does not grow with the
list as RULER's does. Prompts have at most the length asked for, and are a few words shorter.
"""

from __future__ import annotations

import math
import random
import string
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, count

from kvfold.evaluation.ruler_tracking import EXAMPLE_FROM
from kvfold.evaluation.ruler_words import draw_words
from kvfold.evaluation.sample import Sample, Wanted, distinct, task
from kvfold.text import encode

COMMON, FREQUENT = 10, 3
"""Words that are asked for."""
ZETA = math.pi**2 / 6
"""Of 2, the exponent of the counts of coded words."""

_SHORT, _LONG, _SHOWN = (6, 1), (30, 3), (3, 1)
"""How often common words and others stand in a short list, a long one and the example's."""
_LONG_FROM = 4096
"""Tokens of a prompt from which on a list is long."""
_SHOWN_OTHERS = 10
"""Other words of the example."""
_NOISE = " ..."
_COMMON_PREFACE = "Below is a numbered list of words, some of which stand in it often.\n\n"
_COMMON_QUESTION = f"Which {COMMON} words stand most often in the list above?"
_COMMON_OPENING = f"The {COMMON} words that stand most often in the list are:"
_FREQUENT_PREFACE = "Below is a coded text. Watch how often each coded word stands in it.\n\n"
_FREQUENT_QUESTION = (
    f"Which {FREQUENT} coded words stand most often in the text above? Leave the dots aside."
)
_FREQUENT_OPENING = f"The {FREQUENT} coded words that stand most often in the text are:"


def draw_common(name: str, wanted: Wanted) -> Iterator[Sample]:
    """Lists with ten common words.

    Args:
        name: Of the set.
        wanted: What they are made for.

    Yields:
        Samples; none where there is too little room for the common words and another one.
    """
    often, seldom = _LONG if wanted.length >= _LONG_FROM else _SHORT
    room = wanted.room(_COMMON_QUESTION, _COMMON_OPENING)
    if room < 2 * COMMON:
        return
    numbers = _encoded(wanted, [f" {number}." for number in range(1, room // 2 + 1)])
    for index in count():
        own = wanted.generator(name, index)
        words = draw_words(own, COMMON + _SHOWN_OTHERS + COMMON + room // (2 * seldom))
        shown, listed = words[: COMMON + _SHOWN_OTHERS], words[COMMON + _SHOWN_OTHERS :]
        example = _example(own, shown) if wanted.length >= EXAMPLE_FROM else ""
        preface = encode(wanted.tokenizer, f"{_COMMON_PREFACE}{example}")
        pieces = _encoded(wanted, [f" {word}" for word in listed])
        entries = _entries(pieces, numbers, (often, seldom), room - len(preface))
        if len(entries) <= COMMON * often:
            return
        own.shuffle(entries)
        document = chain.from_iterable(chain.from_iterable(zip(numbers, entries, strict=False)))
        prompt = wanted.prompt([*preface, *document], _COMMON_QUESTION, _COMMON_OPENING)
        yield task(name, index, prompt, tuple(listed[:COMMON]))


def draw_frequent(name: str, wanted: Wanted) -> Iterator[Sample]:
    """Texts of coded words.

    Args:
        name: Of the set.
        wanted: What they are made for.

    Yields:
        Samples; none where the text is too short for the words asked for to differ in their counts.
    """
    preface = encode(wanted.tokenizer, _FREQUENT_PREFACE)
    room = wanted.room(_FREQUENT_QUESTION, _FREQUENT_OPENING) - len(preface)
    for index in count():
        own = wanted.generator(name, index)
        words = _coded_words(own, math.isqrt(max(room, 1)))
        pieces = _encoded(wanted, [_NOISE, *(f" {word}" for word in words)])
        total = _most_words(list(map(len, pieces)), room)
        counts = [coded_count(total, rank) for rank in range(1, len(pieces) + 1)]
        asked = counts[1 : FREQUENT + 2]
        if len(set(asked)) < FREQUENT + 1:
            return
        text = [piece for piece, times in zip(pieces, counts, strict=True) for _ in range(times)]
        own.shuffle(text)
        document = [*preface, *chain.from_iterable(text)]
        prompt = wanted.prompt(document, _FREQUENT_QUESTION, _FREQUENT_OPENING)
        yield task(name, index, prompt, tuple(words[:FREQUENT]))


def coded_count(total: int, rank: int) -> int:
    """How often the word of a rank, 1 at the least, stands among so many."""
    return int(total / (ZETA * rank**2))


def _entries(
    words: Sequence[list[int]], numbers: Sequence[list[int]], times: tuple[int, int], room: int
) -> list[list[int]]:
    """As many words as fit with their numbers, the common ones first, each as often as it stands.

    Args:
        words: Tokens of each word.
        numbers: Tokens of each place in the list.
        times: How often common words and others stand in it.
        room: Tokens there are.
    """
    entries: list[list[int]] = []
    for at, word in enumerate(words):
        more = times[0] if at < COMMON else times[1]
        labels = numbers[len(entries) : len(entries) + more]
        room -= more * len(word) + sum(map(len, labels))
        if room < 0:
            break
        entries += [word] * more
    return entries


def _example(own: random.Random, words: Sequence[str]) -> str:
    """A short list, its question and its answer."""
    often, seldom = _SHOWN
    entries = [
        word for at, word in enumerate(words) for _ in range(often if at < COMMON else seldom)
    ]
    own.shuffle(entries)
    return (
        f"{_numbered(entries)}\n\n{_COMMON_QUESTION}\n{_COMMON_OPENING} "
        f"{_numbered(words[:COMMON])}\n\n{_COMMON_PREFACE}"
    )


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _coded_words(own: random.Random, size: int) -> tuple[str, ...]:
    """Different words of six random letters."""
    return distinct(size, lambda: "".join(own.choices(string.ascii_lowercase, k=6)))


def _most_words(lengths: Sequence[int], room: int) -> int:
    """The greatest total whose words fit, counted by rank.

    Args:
        lengths: Tokens of the word of each rank.
        room: Tokens there are.
    """

    def cost(total: int) -> int:
        return sum(
            length * coded_count(total, rank) for rank, length in enumerate(lengths, start=1)
        )

    return bisect_right(range(2 * max(room, 1)), room, key=cost) - 1


def _encoded(wanted: Wanted, texts: list[str]) -> list[list[int]]:
    """Pieces of text as tokens, one by one."""
    return list(wanted.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
