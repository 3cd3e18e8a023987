"""Other libraries in the tables of an evaluation: what was asked goes out, answers come in.

Both are files of JSON lines in the folder of an evaluation, so that a library may answer from an
environment of its own, with the versions that it wants. Samples go out as the tokens that kvfold's
caches have read, with how many of them a cache may keep when it is cut. Answers come back as
tokens, with the distance to the peer's own full cache and the bytes held, and are judged here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.artifacts import write_files
from kvfold.budget import Budget
from kvfold.errors import ArtifactError, ConfigError
from kvfold.evaluation.batch_decoding import Answer
from kvfold.evaluation.fidelity import Fidelity, digests, draw_all
from kvfold.evaluation.fidelity_rows import Row, RowStore, key_of
from kvfold.evaluation.fidelity_settings import FULL
from kvfold.evaluation.generation import has_end, stop_tokens
from kvfold.evaluation.sample import Sample
from kvfold.evaluation.samples import SETS
from kvfold.evaluation.statistics import Share
from kvfold.evaluation.verdict import NO_VERDICT, judge_answer
from kvfold.models import fingerprint

FORMAT = 1
"""Version of both files' layout."""
QUESTIONS, ANSWERS = "questions.jsonl", "answers.jsonl"
"""Names of the files."""

_Line = TypeVar("_Line")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One sample as a peer reads it."""

    id: str
    """Hash of all that is said here, and of the model."""
    set: str
    """The set of the sample."""
    index: int
    """Its place in the set."""
    length: int
    """Tokens that it was made for, at most."""
    context: list[int]
    """Tokens that a cache has read when it is cut."""
    question: list[int]
    """Tokens that come after the cut; none where the prompt is read as a whole."""
    continuation: list[int] | None
    """What follows a text; None for a task, which is answered."""
    expected: list[str]
    """What a right answer has one of, or all of."""
    max_new_tokens: int
    """Most tokens of an answer."""
    keep: dict[str, int]
    """By budget, tokens of the context that a layer may keep at the cut."""
    classes: list[str] = field(default_factory=list)
    """Classes that an answer chooses from, where there are some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """What a peer made of a question."""

    id: str
    """Of the question."""
    peer: str
    """Its name in the tables, such as `kvpress:snapkv`."""
    budget: str
    """One of the question's, or the budget of everything."""
    tokens: list[int]
    """The answer, greedy, without the token that ends it; empty for a text."""
    divergences: list[float]
    """`KL(peer's full cache || peer)` in nats after each token of the full cache's answer, or of
    the continuation."""
    agreements: list[bool]
    """Whether both find the same token likeliest, after each."""
    tokens_kept: int
    """After the question: tokens that a layer holds."""
    bytes_held: int
    """After the question: bytes of the cache, whatever is kept beside keys and values included."""
    versions: dict[str, str]
    """Of what computed it, by name."""


def write_questions(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    fidelity: Fidelity,
    *,
    source: str,
) -> Path:
    """Write the samples of an evaluation for peers, with what they need to know of the model.

    Args:
        folder: Of the evaluation.
        model: That was judged.
        tokenizer: Of the model.
        fidelity: What was found.
        source: From where a peer loads the model.

    Returns:
        The file.

    Raises:
        ConfigError: When the samples or the model are not those of the evaluation.
    """
    subject, settings = fidelity.subject, fidelity.settings
    samples = draw_all(tokenizer, settings)
    if fingerprint(model) != subject.fingerprint or digests(settings, samples) != subject.samples:
        raise ConfigError(
            f"the model or the samples are no longer those of the results in {str(folder)!r}: give "
            "the same KVFOLD_DATA, or run kvfold eval again"
        )
    head = {
        "format": FORMAT,
        "model": source,
        "dtype": subject.dtype,
        "stop": sorted(stop_tokens(model, tokenizer)),
        "budgets": _budgets(fidelity),
    }
    questions = [
        asdict(_question(fidelity, sample, length))
        for (_, length), found in samples.items()
        for sample in found
    ]
    text = "".join(json.dumps(each) + "\n" for each in (head, *questions))
    (path,) = write_files(folder, {QUESTIONS: lambda path: path.write_text(text, encoding="utf-8")})
    return path


def add_answers(folder: Path, tokenizer: PreTrainedTokenizerBase, fidelity: Fidelity) -> Fidelity:
    """Judge the answers of peers, and put them after the rows of an evaluation.

    Args:
        folder: Of the evaluation, with questions and answers; the rows go into its file, too.
        tokenizer: Of the model.
        fidelity: What was found, with or without answers of before.

    Returns:
        The evaluation with a row for every answer.

    Raises:
        ArtifactError: When a file is missing or damaged, or answers something else.
    """
    questions = {each.id: each for each in _read(folder / QUESTIONS, Question, skip=1)}
    answers = {
        (each.peer, each.budget, each.id): each for each in _read(folder / ANSWERS, PeerAnswer)
    }
    own = {FULL, *(spec.label for spec in fidelity.settings.judged)}
    if not questions.keys() >= {each.id for each in answers.values()} or own & {
        each.peer for each in answers.values()
    }:
        raise ArtifactError(
            f"{folder / ANSWERS} answers what {QUESTIONS} does not ask, or by the name of a method "
            "that was judged: remove it, and let the peers answer again"
        )
    kept = [row for row in fidelity.rows if row.method in own]
    full = _full(kept)
    rows = []
    places = {name: place for place, name in enumerate(questions)}
    for answer in sorted(answers.values(), key=lambda e: (e.peer, e.budget, places[e.id])):
        question = questions[answer.id]
        reference = full[question.set, question.length, question.index]
        rows.append(_row(tokenizer, question, answer, reference))
    RowStore(folder, Row.from_dict, resume=True).add(rows)
    return replace(fidelity, rows=(*kept, *rows))


def same_as_full(fidelity: Fidelity, peer: str) -> Share | None:
    """How many answers of a peer are the full cache's, token for token as far as text tells.

    Args:
        fidelity: With the peer's rows.
        peer: Its name, such as that of a full cache of its own.

    Returns:
        None where it has answered nothing.
    """
    full = _full(fidelity.rows)
    pairs = [
        (row, full[row.set, row.length, row.index])
        for row in fidelity.rows
        if row.method == peer and row.answer is not None
    ]
    same = [
        (row.answer, row.answer_tokens) == (other.answer, other.answer_tokens)
        for row, other in pairs
    ]
    return Share(sum(same), len(same)) if same else None


def _question(fidelity: Fidelity, sample: Sample, length: int) -> Question:
    settings = fidelity.settings
    late = sample.question if settings.protocol == "agnostic" else 0
    cut = len(sample.prompt) - late
    facts = {
        "set": sample.set,
        "index": sample.index,
        "length": length,
        "context": sample.prompt[:cut],
        "question": sample.prompt[cut:],
        "continuation": sample.continuation,
        "expected": list(sample.expected),
        "max_new_tokens": settings.answer_tokens(sample.set),
        "keep": {
            budget: min(Budget.parse(budget).tokens(cut), cut) for budget in _budgets(fidelity)
        },
        **({"classes": list(sample.classes)} if sample.classes else {}),
    }
    subject = fidelity.subject
    return Question(
        id=key_of({**facts, "model": subject.fingerprint, "dtype": subject.dtype}), **facts
    )


def _budgets(fidelity: Fidelity) -> list[str]:
    return [str(Budget.parse(each)) for each in fidelity.settings.budgets]


def _row(
    tokenizer: PreTrainedTokenizerBase, question: Question, answer: PeerAnswer, full: Row
) -> Row:
    """The row of an answer; what it has in common with the full cache's is taken from there."""
    verdict = NO_VERDICT
    if question.continuation is None:
        limit = question.max_new_tokens
        verdict = judge_answer(
            tokenizer,
            question.set,
            question.expected,
            _ended(tokenizer, answer.tokens, limit, SETS[question.set].stop),
            full_is_cut=full.answer_tokens == limit,
            classes=question.classes,
        )
    return replace(
        full,
        key=key_of(
            {
                "id": answer.id,
                "peer": answer.peer,
                "budget": answer.budget,
                "versions": answer.versions,
            }
        ),
        method=answer.peer,
        budget=answer.budget,
        divergences=answer.divergences,
        agreements=answer.agreements,
        nll=None,
        tokens_kept=answer.tokens_kept,
        bytes_held=answer.bytes_held,
        bytes_fast=answer.bytes_held,
        **asdict(verdict),
    )


def _ended(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], limit: int, stops: Sequence[str]
) -> Answer:
    """A peer's answer up to the first string that ends one: peers know of none."""
    counts = range(1, len(tokens) + 1) if stops else ()
    end = next((count for count in counts if has_end(tokenizer, tokens[:count], stops)), None)
    return Answer(tokens[:end], end is None and len(tokens) == limit)


def _full(rows: Iterable[Row]) -> dict[tuple[str, int, int], Row]:
    """The full cache's rows by set, length and place in the set."""
    return {(row.set, row.length, row.index): row for row in rows if row.method == FULL}


def _read(path: Path, kind: type[_Line], *, skip: int = 0) -> list[_Line]:
    """The lines of a file after the first ones."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[skip:]
        return [kind(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(
            f"{path} is missing or damaged ({type(error).__name__}: {error}): write it again"
        ) from error
