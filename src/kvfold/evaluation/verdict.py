"""What an answer comes to: its text, whether it is right, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvfold.evaluation.answers import Fault, before_stop, find_fault, found_share
from kvfold.evaluation.batch_decoding import Answer
from kvfold.evaluation.samples import SETS


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a row says of an answer, by the names that it has there."""

    answer: str | None
    """Its text; None where nothing was asked."""
    answer_tokens: int | None
    """Its length."""
    is_right: bool | None
    """Whether it is right; None where a score says how good it is."""
    found: float | None
    """Share of what is expected that it has, where all is wanted."""
    fault: Fault | None
    """What is wrong with it, if it is not."""
    score: float | None = None
    """A benchmark's own score of it, from 0 to 1; None where the set has none."""


NO_VERDICT = Verdict(None, None, None, None, None)
"""Of a text, where nothing is asked."""


def judge_answer(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    expected: Iterable[str],
    answer: Answer,
    *,
    full_is_cut: bool,
    classes: Sequence[str] = (),
) -> Verdict:
    """Judge an answer as its set does.

    Args:
        tokenizer: Of the model.
        name: Of the set.
        expected: What a right answer has one of, or all of.
        answer: What was said.
        full_is_cut: Whether the full cache's answer stopped at the most tokens allowed.
        classes: That an answer chooses from, where there are some.
    """
    kind, expected = SETS[name], tuple(expected)
    whole = str(tokenizer.decode(answer.tokens, skip_special_tokens=True))
    said = before_stop(whole, kind.stop)
    text = said.strip()
    # Blanks count where a line of code is compared.
    score = None if kind.metric is None else kind.metric.score(expected, said, classes)
    if kind.metric is None:
        right = kind.is_right(expected, text)
    else:
        right = None if kind.metric.is_graded else score == 1
    return Verdict(
        answer=text,
        answer_tokens=len(answer.tokens),
        is_right=right,
        found=found_share(expected, text) if kind.wants_all else None,
        fault=None
        if right is None
        else find_fault(
            answer.tokens, is_right=right, is_cut=answer.is_cut, full_is_cut=full_is_cut
        ),
        score=score,
    )
