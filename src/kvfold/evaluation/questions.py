"""HotpotQA's questions, each with its evidence among that of other questions.

`hotpotqa` tells the evidence sentence by sentence. `ruler-qa` has the shape of RULER's question
answering (arXiv 2404.06654): numbered documents, and what is to be done said before and after them.
Departures from RULER: a document has a title's sentences of evidence, not its whole paragraph, and
a question that does not fit with its own documents is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from kvfold.evaluation.public_data import Question, questions
from kvfold.evaluation.sample import Sample, Wanted, fill, task
from kvfold.text import encode


@dataclass(frozen=True, slots=True)
class Shape:
    """How documents and a question are told."""

    documents: Callable[[Question], tuple[str, ...]]
    """A question's own documents."""
    ask: Callable[[str], str]
    """What is asked, from the question."""
    preface: str = ""
    """What stands before the documents."""
    heading: Callable[[int], str] = lambda number: ""
    """What stands before a document, from its place among them, which begins at 1."""


def draw_questions(name: str, shape: Shape, wanted: Wanted) -> Iterator[Sample]:
    """Questions with as many documents as fit; only those whose own ones do.

    Args:
        name: Of the set.
        shape: How they are told.
        wanted: What they are made for.

    Yields:
        Samples in an order that the seed gives.
    """
    rows, tokenizer = questions(), wanted.tokenizer
    told = {text: encode(tokenizer, text) for row in rows for text in shape.documents(row)}
    preface = encode(tokenizer, shape.preface)
    widest = encode(tokenizer, shape.heading(len(told)))
    sized = {text: [*widest, *tokens] for text, tokens in told.items()}
    order = list(range(len(rows)))
    wanted.generator(name).shuffle(order)
    index = 0
    for row in (rows[number] for number in order):
        own, evidence = wanted.generator(name, row.question), shape.documents(row)
        question = shape.ask(row.question)
        room = wanted.room(question) - len(preface) - sum(len(sized[text]) for text in evidence)
        if room < 0:
            continue
        others = [text for text in told if text not in evidence]
        chosen = [*evidence, *fill(own, others, room, sized)]
        own.shuffle(chosen)
        headed = (
            [*encode(tokenizer, shape.heading(place)), *told[text]]
            for place, text in enumerate(chosen, start=1)
        )
        prompt = wanted.prompt(chain(preface, chain.from_iterable(headed)), question)
        yield task(name, index, prompt, (row.answer,))
        index += 1


def _lines(row: Question) -> tuple[str, ...]:
    """Each sentence of evidence, with its title."""
    return tuple(f"{line}\n" for line in row.evidence)


def _by_title(row: Question) -> tuple[str, ...]:
    """The sentences of each title, one after the other."""
    found: dict[str, list[str]] = {}
    for line in row.evidence:
        title, _, sentence = line.partition(_DASH)
        found.setdefault(title, []).append(sentence)
    return tuple(f"{title}\n{' '.join(sentences)}\n\n" for title, sentences in found.items())


_DASH = " — "
_TASK = "Answer the question at the end from the documents, and say nothing but the answer."

LINES = Shape(_lines, lambda question: f"{question}\nReply with the answer alone, a few words.")
"""Sentences, one a line."""
DOCUMENTS = Shape(
    _by_title,
    lambda question: f"{_TASK}\n\nQuestion: {question}",
    preface=f"{_TASK}\n\n",
    heading=lambda number: f"Document {number}:\n",
)
"""As RULER tells them."""
