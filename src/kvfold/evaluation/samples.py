"""Held-out samples that methods are judged on: texts with their continuation, and tasks.

Every set is deterministic in a seed, and its first N samples are the same for every N. Nothing of
it is learnt from: the built-in prose is the part of Python's reference that training leaves out,
and the worked problems are not among those that are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain, islice

from transformers import PreTrainedTokenizerBase

from kvfold.errors import ConfigError
from kvfold.evaluation.answers import (
    begins_with_number,
    contains_all,
    contains_one,
    ends_with_number,
)
from kvfold.evaluation.arithmetic import draw_sums
from kvfold.evaluation.benchmarks import TASKS, draw_task
from kvfold.evaluation.needles import draw_riddles, multikey, multivalue, single
from kvfold.evaluation.prose import Prose, built_in, haystack
from kvfold.evaluation.public_data import (
    EXEMPLARS,
    GSM8K,
    HOTPOTQA,
    VARIABLE,
    WIKITEXT,
    Source,
    data_folder,
    is_at_hand,
    problems,
    require_data,
    wikitext,
)
from kvfold.evaluation.questions import DOCUMENTS, LINES, draw_questions
from kvfold.evaluation.ruler import VARIANTS, draw_needles
from kvfold.evaluation.ruler_counting import draw_common, draw_frequent
from kvfold.evaluation.ruler_tracking import draw_tracking
from kvfold.evaluation.sample import Kind, Sample, Wanted, fill, task
from kvfold.evaluation.scores import METRICS, Metric
from kvfold.registry import Registry
from kvfold.text import encode, leading_tokens

VERSION = 1
"""Of the sets: the same version, data, tokenizer and seed give the same samples."""
REPEATED = 4
"""The passage that comes again is one part of so many of a prompt of `repetition`."""
NEW_TOKENS = 32
"""Most tokens of an answer where a set asks for no more."""
RULER = "ruler"
"""Stands for all sets that are made as RULER's are, but for those whose data is not at hand."""
ALL = "all"
"""As a task of a benchmark, stands for all of its tasks whose data is at hand."""


@dataclass(frozen=True, slots=True)
class SampleSet:
    """Where samples of one name come from."""

    kind: Kind
    """Text or task."""
    draw: Callable[[Wanted], Iterator[Sample]]
    """All there are, in an order that the seed gives."""
    sources: tuple[Source, ...] = ()
    """The public data it needs."""
    is_right: Callable[[Iterable[str], str], bool] = contains_one
    """Whether an answer is right."""
    wants_all: bool = False
    """Whether a right answer has all that is expected; the share that it has counts, too."""
    new_tokens: int = NEW_TOKENS
    """Tokens that are enough for a right answer, also where each digit is one."""
    metric: Metric | None = None
    """A benchmark's own score, which decides what is right."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""

    @property
    def is_at_hand(self) -> bool:
        """Whether nothing has to be fetched for it."""
        return all(map(is_at_hand, self.sources))


SETS: Registry[SampleSet] = Registry("set")
"""Every set by its name."""


def default_sets() -> tuple[str, ...]:
    """All sets of public data where there is a folder of it, else those that need none."""
    return ("prose", "niah") if data_folder() is None else ("wikitext", "hotpotqa", "niah", "gsm8k")


def expand_sets(names: Iterable[str]) -> tuple[str, ...]:
    """Sets by name, with the members of a group, those whose data is at hand, in its place.

    Raises:
        ConfigError: When no data of a benchmark is at hand.
    """
    return tuple(each for name in names for each in _members(name))


def _members(name: str) -> tuple[str, ...]:
    benchmark, slash, rest = name.rpartition("/")
    begin = f"{RULER}-" if name == RULER else f"{benchmark}/" if slash and rest == ALL else None
    family = [each for each in SETS if begin is not None and each.startswith(begin)]
    if not family:
        return (name,)
    found = tuple(each for each in family if SETS[each].is_at_hand)
    if not found:
        raise ConfigError(
            f"no data of {name} is at hand: set {VARIABLE} to a folder that has it, or name a set, "
            f"such as {family[0]}"
        )
    return found


def require_sets(names: Iterable[str]) -> None:
    """Refuse unknown sets, and those whose data or score cannot be had.

    Raises:
        ConfigError: Saying what to do.
    """
    for name in names:
        metric = SETS[name].metric
        for source in SETS[name].sources:
            require_data(source)
        if metric is not None and metric.library and find_spec(metric.library) is None:
            raise ConfigError(
                f"set {name} is scored with {metric.library}: install it (pip install "
                f"{metric.library})"
            )


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


def _repetition(wanted: Wanted) -> Iterator[Sample]:
    """A passage and more prose, then the passage again, whose end is the continuation."""
    prose, first = Prose(wanted.tokenizer, haystack()), leading_tokens(wanted.tokenizer)
    body = wanted.length - len(first)
    passage = body // REPEATED
    again = passage - wanted.tokens
    if again < 1:
        return
    begins = prose.windows(body - again, wanted.generator("repetition"))
    for index, begin in enumerate(begins):
        told = prose.tokens[begin : begin + body - again]
        prompt = [*first, *told, *told[:again]]
        yield Sample("repetition", index, prompt, told[again:passage], ())


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
        chosen = fill(own, worked, wanted.room(question), worked)
        if not chosen:
            continue
        prompt = wanted.prompt(chain.from_iterable(worked[text] for text in chosen), question)
        yield task("gsm8k", index, prompt, (problem.result,))
        index += 1


def _all_of(draw: Callable[[Wanted], Iterator[Sample]], new_tokens: int = NEW_TOKENS) -> SampleSet:
    """A task whose right answers have all that is expected."""
    return SampleSet("task", draw, is_right=contains_all, wants_all=True, new_tokens=new_tokens)


def _register(sets: Mapping[str, SampleSet]) -> None:
    for name, each in sets.items():
        SETS.register(name, each)


_register(
    {
        "wikitext": SampleSet("text", _wikitext, (WIKITEXT,)),
        "hotpotqa": SampleSet("task", partial(draw_questions, "hotpotqa", LINES), (HOTPOTQA,)),
        "niah": SampleSet("task", partial(draw_riddles, "niah", single)),
        "gsm8k": SampleSet("task", _gsm8k, (GSM8K,), ends_with_number),
        "prose": SampleSet("text", _prose),
        "repetition": SampleSet("text", _repetition),
        "arithmetic": SampleSet("task", partial(draw_sums, "arithmetic"), (), begins_with_number),
        "niah-multikey": SampleSet("task", partial(draw_riddles, "niah-multikey", multikey)),
        "niah-multivalue": _all_of(partial(draw_riddles, "niah-multivalue", multivalue)),
        **{name: _all_of(partial(draw_needles, name), 48) for name in VARIANTS},
        "ruler-vt": _all_of(partial(draw_tracking, "ruler-vt", chains=1, hops=4), 40),
        "ruler-cwe": _all_of(partial(draw_common, "ruler-cwe"), 64),
        "ruler-fwe": _all_of(partial(draw_frequent, "ruler-fwe")),
        "ruler-qa": SampleSet("task", partial(draw_questions, "ruler-qa", DOCUMENTS), (HOTPOTQA,)),
        **{
            name: SampleSet(
                "task",
                partial(draw_task, name, each),
                each.sources,
                new_tokens=each.new_tokens,
                metric=METRICS[each.metric],
                stop=each.stop,
            )
            for name, each in TASKS.items()
        },
    }
)
