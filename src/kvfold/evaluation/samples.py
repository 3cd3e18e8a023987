"""Held-out samples that methods are judged on: texts with their continuation, and tasks.

Every set is deterministic in a seed, and its first N samples are the same for every N. Nothing of
it is learnt from: the built-in prose is the part of Python's reference that training leaves out,
and the worked problems are not among those that are asked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

from transformers import PreTrainedTokenizerBase

from kvfold.errors import ConfigError
from kvfold.evaluation.answers import contains_all, contains_one, ends_with_number
from kvfold.evaluation.needles import draw_riddles, multikey, multivalue, single
from kvfold.evaluation.prose import Prose, built_in
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
from kvfold.evaluation.sample import Kind, Sample, Wanted, task
from kvfold.registry import Registry
from kvfold.text import encode, leading_tokens

VERSION = 1
"""Of the sets: the same version, data, tokenizer and seed give the same samples."""
EXEMPLARS = 100
"""So many last problems serve as worked ones, and are never asked."""


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
    wants_all: bool = False
    """Whether a right answer has all that is expected; the share that it has counts, too."""


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
    depths: int | None = None,
) -> list[Sample]:
    """The first samples of a set.

    Args:
        tokenizer: Of the model.
        name: Of the set.
        count: How many.
        length: Tokens of a prompt: exactly in texts and prose with needles, at most elsewhere.
        tokens: Tokens of a text's continuation.
        seed: Of all that is chosen.
        depths: Number of depths, evenly from 0 to 1, at which needles stand in turn; anywhere
            without it.

    Returns:
        `count` samples.

    Raises:
        ConfigError: When the set is unknown, its data cannot be had, or it has fewer samples of
            that length.
    """
    wanted = Wanted(tokenizer, length, tokens, seed, depths)
    found = list(islice(SETS[name].draw(wanted), count))
    if len(found) < count:
        raise ConfigError(
            f"set {name} has {len(found)} samples with prompts of {length} tokens, and {count} are "
            "wanted: ask for fewer samples, or another length"
        )
    return found


def _texts(wanted: Wanted, name: str, text: str) -> Iterator[Sample]:
    """Windows of a text, each with the tokens that follow it."""
    prose, first = Prose(wanted.tokenizer, text), leading_tokens(wanted.tokenizer)
    body = wanted.length - len(first)
    begins = prose.windows(body + wanted.tokens, wanted.generator(name))
    for index, begin in enumerate(begins):
        end = begin + body
        prompt = [*first, *prose.tokens[begin:end]]
        yield Sample(name, index, prompt, prose.tokens[end : end + wanted.tokens], ())


def _wikitext(wanted: Wanted) -> Iterator[Sample]:
    return _texts(wanted, "wikitext", wikitext())


def _prose(wanted: Wanted) -> Iterator[Sample]:
    return _texts(wanted, "prose", built_in())


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
        room = wanted.room(question) - sum(len(lines[line]) for line in row.evidence)
        if room < 0:
            continue
        others = [line for line in lines if line not in row.evidence]
        chosen = [*row.evidence, *_fill(own, others, room, lines)]
        own.shuffle(chosen)
        prompt = wanted.prompt(chain.from_iterable(lines[line] for line in chosen), question)
        yield task("hotpotqa", index, prompt, (row.answer,))
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
        chosen = _fill(own, worked, wanted.room(question), worked)
        if not chosen:
            continue
        prompt = wanted.prompt(chain.from_iterable(worked[text] for text in chosen), question)
        yield task("gsm8k", index, prompt, (problem.result,))
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


def _register(sets: Sequence[tuple[str, SampleSet]]) -> None:
    for name, each in sets:
        SETS.register(name, each)


_register(
    [
        ("wikitext", SampleSet("text", _wikitext, WIKITEXT)),
        ("hotpotqa", SampleSet("task", _hotpotqa, HOTPOTQA)),
        ("niah", SampleSet("task", partial(draw_riddles, "niah", single))),
        ("gsm8k", SampleSet("task", _gsm8k, GSM8K, ends_with_number)),
        ("prose", SampleSet("text", _prose)),
        ("niah-multikey", SampleSet("task", partial(draw_riddles, "niah-multikey", multikey))),
        (
            "niah-multivalue",
            SampleSet(
                "task",
                partial(draw_riddles, "niah-multivalue", multivalue),
                is_right=contains_all,
                wants_all=True,
            ),
        ),
    ]
)
