"""How a text, what is asked about it and the answer are put together, in plain text and in chat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from kvfold.text import encode, leading_tokens

_TEXT, _ANSWER = "@@text@@", "@@answer@@"


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer."""

    question: str
    """Asks for the answer."""
    stem: str
    """Is completed by the answer."""
    answer: str
    """What comes next."""


@dataclass(frozen=True, slots=True)
class Form:
    """Plain text with the places `{question}`, `{stem}` and `{answer}`."""

    head: str
    """Stands before the text."""
    ask: str
    """Stands between the text, or the answer before, and the answer."""
    answer: str
    """The answer and what ends it."""

    def layout(self, turns: Sequence[Turn]) -> tuple[str, str, str]:
        """What stands before the text, what asks, and the first answer with all that follows."""
        asks = [self.ask.format(question=turn.question, stem=turn.stem) for turn in turns]
        answers = [self.answer.format(answer=turn.answer) for turn in turns]
        later = "".join(ask + answer for ask, answer in zip(asks[1:], answers[1:], strict=True))
        return self.head.format(question=turns[0].question), asks[0], answers[0] + later


PLAIN = (
    Form("", "\n\nQ: {question}\nA:", " {answer}\n"),
    Form("", "\n\n### Asked\n{question}\n### Reply\n", "{answer}\n"),
    Form("", "\n\n{stem}", " {answer}.\n"),
    Form(
        "Notes of the day follow; a detail of them will be wanted later.\n\n",
        "\n\nSomebody wants a detail. {question} The notes say:",
        " {answer}.\n",
    ),
    Form(
        "While reading, keep this in mind: {question}\n\n",
        "\n\nThe thing to keep in mind turned out to be:",
        " {answer}\n",
    ),
    Form("{question} Read on to find out.\n\n", "\n\nFound out by reading:", " {answer}\n"),
)
"""Forms for questions about a text; in the last two the question stands first."""

TOKEN = Form("", "\n{stem}", " {answer} >>")
"""The shortest form."""

WORKED = (
    Form("", "Problem: {question}\nWorking:", " {answer}\n\n"),
    Form("", "{question}\n", "{answer}\n\n"),
    Form("", "Given: {question}\nSteps:\n", "{answer}\n\n"),
)
"""Forms for problems, each one like the worked ones before it."""

BARE = Form("", "{question}", " {answer}\n")
"""The form of bare sums."""

CHAT = (
    "{text}\n\n{question}",
    "{question}\n\n{text}",
    "Read these notes and reply in as few words as possible.\n\n{text}\n\n{question}",
    "I will ask this about the text: {question}\n\n{text}\n\nWhat do you say?",
)
"""What the user says first in a chat about a text."""

CHAT_WORKED = (
    "Here are solved problems.\n\n{text}Solve one more in the same way. {question}",
    "{text}{question}",
)
"""What the user says in a chat with worked problems."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt without its filler, as tokens."""

    head: list[int]
    """Stands before the filler."""
    ask: list[int]
    """Stands after it."""
    answer: list[int]
    """Ends the prompt."""
    chat: bool
    """Whether it is in the chat template."""

    def __len__(self) -> int:
        """Tokens in all."""
        return len(self.head) + len(self.ask) + len(self.answer)


class Layouts:
    """Puts questions into plain forms and into the chat template of a tokenizer.

    Args:
        tokenizer: Of the model.

    Attributes:
        chat: Whether it has a template that takes a question and its answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._leading = leading_tokens(tokenizer)
        self.chat = self._render(CHAT[0], [Turn("question", "", "answer")]) is not None

    def draw(
        self,
        generator: random.Random,
        turns: Sequence[Turn],
        *,
        plain: Sequence[Form] = PLAIN,
        chat: Sequence[str] = CHAT,
    ) -> Layout:
        """Choose a form; every second one is a chat where there can be one.

        Args:
            generator: Chooses.
            turns: Questions and answers, in order.
            plain: Forms to choose from.
            chat: What the user may say first in a chat, with `{text}` and `{question}`.
        """
        if self.chat and generator.random() < 0.5:
            parts = self._render(generator.choice(chat), turns)
            if parts is not None:
                return self._encode([], parts, chat=True)
        return self.plain(turns, generator.choice(plain))

    def plain(self, turns: Sequence[Turn], form: Form) -> Layout:
        """Put questions and answers into a plain form."""
        return self._encode(self._leading, form.layout(turns), chat=False)

    def _encode(self, leading: list[int], parts: tuple[str, str, str], *, chat: bool) -> Layout:
        head, ask, answer = (encode(self._tokenizer, part) if part else [] for part in parts)
        return Layout([*leading, *head], ask, answer, chat)

    def _render(self, content: str, turns: Sequence[Turn]) -> tuple[str, str, str] | None:
        """The parts of a chat; None where the template does not let them through."""
        if self._tokenizer.chat_template is None:
            return None
        first, *others = turns
        said = [content.format(text=_TEXT, question=first.question), _ANSWER]
        for turn in others:
            said += [turn.question, turn.answer]
        messages = [
            {"role": "assistant" if index % 2 else "user", "content": text}
            for index, text in enumerate(said)
        ]
        try:
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateError:
            return None
        if text.count(_TEXT) != 1 or text.count(_ANSWER) != 1:
            return None
        head, _, rest = text.partition(_TEXT)
        ask, _, after = rest.partition(_ANSWER)
        return head, ask, first.answer + after
