"""Generated prompts of exact length whose end is told by something that stands far before it.

A prompt is what stands first, a filler, what asks, and the answer. Only the filler is cut to
length: facts, questions and answers are always whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvfold.errors import ConfigError
from kvfold.text import encode
from kvfold.training.facts import Fact, draw_chain, draw_facts, draw_recital, draw_token
from kvfold.training.forms import (
    BARE,
    CHAT_WORKED,
    PLAIN,
    TOKEN,
    WORKED,
    Form,
    Layout,
    Layouts,
    Turn,
)
from kvfold.training.passages import Passages
from kvfold.training.problems import draw_problem, draw_sum
from kvfold.training.words import SECRETS, Split, words_of

VERSION = 1
"""Of what is generated: the same version, words and seed give the same prompts."""

MOST_FACTS = 8
"""Facts in one prompt at most; the words for validation do not make many more."""
_TOKENS_A_FACT = 256
_LONGEST_RECITAL = 128
_FOLLOWING = (8, 32)
"""Tokens of other prose that follow an answer, where some do."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt with its answer."""

    tokens: list[int]
    """All of it."""
    scored: int
    """How many of the last tokens are the answer and what follows it."""
    answer: str
    """What these begin with, but for a space."""
    task: str
    """`fact`, `facts` (two questions), `chain`, `recital`, `token`, `problem` or `sum`."""


class RetrievalPrompts:
    """Prose in which facts or a passage are hidden that the end asks for.

    Args:
        tokenizer: Of the model; its chat template is used in half of the prompts.
        passages: The prose.
        length: Tokens of a prompt.

    Attributes:
        chat: Whether the tokenizer has a chat template that can be used.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, passages: Passages, *, length: int
    ) -> None:
        self._tokenizer = tokenizer
        self.passages = passages
        self._length = length
        self._layouts = Layouts(tokenizer)
        self.chat = self._layouts.chat

    def draw(self, generator: random.Random, split: Split) -> Prompt:
        """One prompt; a shorter task takes the place of one that does not fit.

        Args:
            generator: Chooses.
            split: Whose prose, words and names it is made of.

        Raises:
            ConfigError: When no task fits into the length.
        """
        drawn = generator.choices((self._facts, self._chain, self._recital), (5, 2, 3))[0]
        for write in (drawn, self._fact, self._token):
            if prompt := write(generator, split):
                return prompt
        raise _too_short("retrieval", self._length)

    def _facts(self, generator: random.Random, split: Split) -> Prompt | None:
        most = min(MOST_FACTS, 1 + self._length // _TOKENS_A_FACT)
        facts = draw_facts(generator, split, generator.randint(1, most))
        if len(facts) > 1 and generator.random() < 0.3:
            return self._ask(generator, split, facts, task="facts")
        return self._ask(generator, split, facts, task="fact")

    def _fact(self, generator: random.Random, split: Split) -> Prompt | None:
        return self._ask(generator, split, draw_facts(generator, split, 1), task="fact")

    def _chain(self, generator: random.Random, split: Split) -> Prompt | None:
        most = min(MOST_FACTS, self._length // _TOKENS_A_FACT)
        others = draw_facts(generator, split, generator.randint(0, most))
        chain = draw_chain(generator, split)
        facts = [chain, *(fact for fact in others if fact.key != chain.key)]
        return self._ask(generator, split, facts, task="chain")

    def _recital(self, generator: random.Random, split: Split) -> Prompt | None:
        count = generator.randint(8, max(8, min(_LONGEST_RECITAL, self._length // 6)))
        if generator.random() < 0.4:
            words = words_of(SECRETS, split)
            passage = ", ".join(generator.sample(words, min(2 + count // 3, len(words))))
        else:
            ids = self.passages.take(*self.passages.aligned(generator, split, count))
            passage = str(self._tokenizer.decode(ids)).strip()
        facts = [draw_recital(generator, passage)]
        return self._ask(generator, split, facts, task="recital") if passage else None

    def _token(self, generator: random.Random, split: Split) -> Prompt | None:
        facts = [draw_token(generator, split)]
        layout = self._layouts.plain(_turns(facts), TOKEN)
        return self._finish(generator, split, layout, facts, task="token")

    def _ask(
        self, generator: random.Random, split: Split, facts: list[Fact], *, task: str
    ) -> Prompt | None:
        """Hide all facts and ask for the first one, or for the first two."""
        asked = _turns(facts[: 2 if task == "facts" else 1])
        forms = [form for form in PLAIN if len(asked) == 1 or "{question}" not in form.head]
        layout = self._layouts.draw(generator, asked, plain=forms)
        if not layout.chat and generator.random() < 0.5:
            more = self.passages.aligned(generator, split, generator.randint(*_FOLLOWING))
            following = [*encode(self._tokenizer, "\n"), *self.passages.take(*more)]
            layout = Layout(layout.head, layout.ask, [*layout.answer, *following], chat=False)
        return self._finish(generator, split, layout, facts, task=task)

    def _finish(
        self,
        generator: random.Random,
        split: Split,
        layout: Layout,
        facts: list[Fact],
        *,
        task: str,
    ) -> Prompt | None:
        """Fill up with prose; None where less than a quarter of the prompt would be prose."""
        lines = [line for fact in facts for line in fact.sentences]
        hidden = [encode(self._tokenizer, f"{line}\n\n") for line in lines]
        room = self._length - len(layout) - sum(map(len, hidden))
        if room < self._length // 4:
            return None
        prose, places = draw_prose(self.passages, generator, split, room)
        text = hide(generator, hidden, prose, places)
        tokens = [*layout.head, *text, *layout.ask, *layout.answer]
        return Prompt(tokens, len(layout.answer), facts[0].answer, task)


class ArithmeticPrompts:
    """Worked problems in words, and one more with its solution at the end.

    Args:
        tokenizer: Of the model; its chat template is used in half of the prompts.
        length: Tokens of a prompt.

    Attributes:
        chat: Whether the tokenizer has a chat template that can be used.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, length: int) -> None:
        self._tokenizer = tokenizer
        self._length = length
        self._layouts = Layouts(tokenizer)
        self.chat = self._layouts.chat

    def draw(self, generator: random.Random, split: Split) -> Prompt:
        """One prompt; bare sums take the place of problems that do not fit.

        Args:
            generator: Chooses.
            split: Whose names and things it is made of.

        Raises:
            ConfigError: When not even sums fit into the length.
        """
        form = generator.choice(WORKED)
        asked = _problem(generator, split)
        layout = self._layouts.draw(generator, [asked], plain=[form], chat=CHAT_WORKED)
        if (room := self._length - len(layout)) >= self._length // 4:
            worked = self._worked(form, room, lambda: _problem(generator, split))
            return _joined(layout, worked, asked.answer, "problem")
        asked = _sum(generator)
        layout = self._layouts.plain([asked], BARE)
        if (room := self._length - len(layout)) < 0:
            raise _too_short("arithmetic", self._length)
        worked = self._worked(BARE, room, lambda: _sum(generator))
        return _joined(layout, worked, asked.answer, "sum")

    def _worked(self, form: Form, count: int, draw: Callable[[], Turn]) -> list[int]:
        """The last tokens of as many worked problems as it takes."""
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += self._example(form, draw())
        return tokens[len(tokens) - count :]

    def _example(self, form: Form, turn: Turn) -> list[int]:
        return encode(self._tokenizer, "".join(form.layout([turn])))


def draw_prose(
    passages: Passages, generator: random.Random, split: Split, count: int
) -> tuple[list[int], list[int]]:
    """So many tokens of prose, and where paragraphs begin in it."""
    tokens: list[int] = []
    places: list[int] = []
    while len(tokens) < count:
        begin, end = passages.aligned(generator, split, count - len(tokens))
        places += [len(tokens) + place - begin for place in passages.pieces(begin, end)]
        tokens += passages.take(begin, end)
    return tokens, places


def hide(
    generator: random.Random, hidden: list[list[int]], prose: list[int], places: list[int]
) -> list[int]:
    """Put sentences into prose at random depths, between paragraphs where some begin nearby.

    Args:
        generator: Chooses the depths.
        hidden: The sentences.
        prose: The prose.
        places: Where its paragraphs begin.

    Returns:
        Both together, as long as their sum.
    """
    depths = sorted(_place(generator, len(prose), places) for _ in hidden)
    text: list[int] = []
    done = 0
    for depth, sentence in zip(depths, generator.sample(hidden, len(hidden)), strict=True):
        text += [*prose[done:depth], *sentence]
        done = depth
    return [*text, *prose[done:]]


def _place(generator: random.Random, count: int, places: list[int]) -> int:
    wanted = generator.randint(0, count)
    nearest = min(places, key=lambda place: abs(place - wanted), default=wanted)
    return nearest if abs(nearest - wanted) <= count // 8 else wanted


def _turns(facts: list[Fact]) -> list[Turn]:
    return [Turn(fact.question, fact.stem, fact.answer) for fact in facts]


def _problem(generator: random.Random, split: Split) -> Turn:
    problem = draw_problem(generator, split)
    steps = " ".join(problem.steps)
    return Turn(problem.story, "", f"{steps} Result: {problem.result}.")


def _sum(generator: random.Random) -> Turn:
    question, answer = draw_sum(generator)
    return Turn(question, "", answer)


def _joined(layout: Layout, filler: list[int], answer: str, task: str) -> Prompt:
    tokens = [*layout.head, *filler, *layout.ask, *layout.answer]
    return Prompt(tokens, len(layout.answer), answer, task)


def _too_short(name: str, length: int) -> ConfigError:
    return ConfigError(
        f"no {name} prompt fits into {length} tokens of this tokenizer: give a larger length, or "
        f"sources without {name}"
    )
