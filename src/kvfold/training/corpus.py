"""The texts that learned parts are trained and validated on, as excerpts of exact length."""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from kvfold.errors import ConfigError
from kvfold.text import leading_tokens, unseen_paragraphs
from kvfold.training import facts, forms, prompts, records, words
from kvfold.training.passages import SHORTEST, Passages, read_passages
from kvfold.training.texts import cut, read_texts
from kvfold.training.words import SPLITS, Split

DEFAULT = {"reference": 0.4, "retrieval": 0.4, "arithmetic": 0.2}
"""The built-in sources and their shares of the source `default`."""

_WEIGHTED = re.compile(r"(?P<name>.+)=(?P<weight>\d+(\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Something to learn from."""

    tokens: torch.Tensor
    """Token ids, int64 `[T]`."""
    kind: str
    """The source that it is from."""
    scored: int | None
    """How many of the last tokens are worth predicting; None where all are."""


class _Source(Protocol):
    sha256: str

    def draw(self, generator: random.Random, split: Split) -> tuple[list[int], int | None]: ...

    def describe(self) -> dict[str, object]: ...


class Corpus:
    """Excerpts drawn from weighted sources; `open_corpus` makes one.

    Args:
        sources: By name, with the shares in which they are drawn.
        length: Tokens of an excerpt.
        seed: Of the drawing.
    """

    def __init__(
        self, sources: dict[str, tuple[_Source, float]], *, length: int, seed: int
    ) -> None:
        self._sources = sources
        self._length = length
        self._seed = seed

    def excerpt(self, index: int, split: Split) -> Excerpt:
        """The excerpt of a number, always the same one.

        Args:
            index: From 0 on; there is no end.
            split: `train` or `validation`; they share no text, names or words.

        Returns:
            The excerpt.

        Raises:
            ConfigError: For another split or a negative number.
        """
        if split not in SPLITS or index < 0:
            raise ConfigError(
                f"there is no excerpt {index} of {split!r}: count from 0, in one of {SPLITS}"
            )
        generator = random.Random(f"{self._seed}/{split}/{index}")
        weights = [weight for _, weight in self._sources.values()]
        kind = generator.choices(list(self._sources), weights)[0]
        tokens, scored = self._sources[kind][0].draw(generator, split)
        return Excerpt(torch.tensor(tokens), kind, scored)

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each source: of its text, or of what its prompts are generated from."""
        return {name: source.sha256 for name, (source, _) in self._sources.items()}

    def describe(self) -> dict[str, object]:
        """What a training record tells of the texts, as JSON has it."""
        sources = [
            {"name": name, "weight": weight, "sha256": source.sha256, **source.describe()}
            for name, (source, weight) in self._sources.items()
        ]
        return {"length": self._length, "seed": self._seed, "sources": sources}


def open_corpus(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, length: int, seed: int
) -> Corpus:
    """Read and tokenize sources, once.

    A source is a text file; a folder, of which all text files are read; `file.jsonl` or
    `file.jsonl:field`; `hf:owner/name[/config][:split[:field]]`; or a built-in one: `reference`
    (what comes with Python), `retrieval`, `arithmetic`, `records` and `quiz` (generated prompts),
    `default` (a mix of the first three). `name=3` gives a source the weight 3; else it has 1.

    Args:
        sources: At least one.
        tokenizer: Of the model.
        length: Tokens of an excerpt, the one that begins a text included.
        seed: Of the drawing.

    Returns:
        The corpus.

    Raises:
        ConfigError: When a source is missing, cannot be read or is too short.

    Example:
        >>> corpus = open_corpus(["default", "notes/"], tokenizer, length=1024, seed=0)
        >>> corpus.excerpt(0, "train").tokens.shape
        torch.Size([1024])
    """
    return open_corpora(sources, tokenizer, lengths=[length], seed=seed)[0]


def open_corpora(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: Sequence[int],
    seed: int,
) -> list[Corpus]:
    """The same sources in excerpts of several lengths: all hold out the same text for validation.

    Excerpts of one number are made of the same draws whatever their length, and may share names,
    facts and text: give numbers to one length or another to have none twice.

    Args:
        sources: As for `open_corpus`.
        tokenizer: Of the model.
        lengths: Tokens of an excerpt of each corpus, at least one.
        seed: Of the drawing.

    Returns:
        A corpus of each length.

    Raises:
        ConfigError: When a source is missing, cannot be read or is too short.
    """
    if min(lengths) < SHORTEST:
        raise ConfigError(
            f"excerpts of {min(lengths)} tokens are too short: give at least {SHORTEST}"
        )
    weights, corpora = _weights(sources), []
    for length in lengths:
        opened = _open(list(weights), tokenizer, length, longest=max(lengths))
        weighted = {name: (opened[name], weight) for name, weight in weights.items()}
        corpora.append(Corpus(weighted, length=length, seed=seed))
    return corpora


class _Text:
    """Excerpts of a text."""

    def __init__(
        self, passages: Passages, sha256: str, tokenizer: PreTrainedTokenizerBase, length: int
    ) -> None:
        self.sha256 = sha256
        self._passages = passages
        self._leading = leading_tokens(tokenizer)
        self._count = length - len(self._leading)

    def draw(self, generator: random.Random, split: Split) -> tuple[list[int], int | None]:
        begin, end = self._passages.window(generator, split, self._count)
        return [*self._leading, *self._passages.take(begin, end)], None

    def describe(self) -> dict[str, object]:
        runs = self._passages.runs.items()
        held = {split: sum(end - begin for begin, end in spans) for split, spans in runs}
        return {"tokens": held, "block": self._passages.block}


class _Writer(Protocol):
    chat: bool

    def draw(self, generator: random.Random, split: Split) -> prompts.Prompt: ...


class _Generated:
    """Generated prompts."""

    def __init__(
        self,
        writer: _Writer,
        made_of: object,
    ) -> None:
        self.sha256 = hashlib.sha256(repr((prompts.VERSION, made_of)).encode()).hexdigest()
        self._writer = writer

    def draw(self, generator: random.Random, split: Split) -> tuple[list[int], int | None]:
        prompt = self._writer.draw(generator, split)
        return prompt.tokens, prompt.scored

    def describe(self) -> dict[str, object]:
        return {"generator": prompts.VERSION, "chat": self._writer.chat}


def _weights(sources: Sequence[str]) -> dict[str, float]:
    """The share of each source; one that is named twice has both weights."""
    if isinstance(sources, str) or not sources:
        raise ConfigError(f"no list of sources in {sources!r}: give at least one, such as default")
    weights: dict[str, float] = {}
    for source in sources:
        name, weight = _parse(source)
        parts = DEFAULT if name == "default" else {name: 1.0}
        for part, share in parts.items():
            weights[part] = weights.get(part, 0.0) + weight * share
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _parse(source: str) -> tuple[str, float]:
    weighted = _WEIGHTED.fullmatch(source)
    if weighted is None or Path(source).exists():
        return source, 1.0
    weight = float(weighted["weight"])
    if weight == 0:
        raise ConfigError(f"{source} has no weight: give a positive one, or leave the source out")
    return weighted["name"], weight


def _open(
    names: list[str], tokenizer: PreTrainedTokenizerBase, length: int, *, longest: int
) -> dict[str, _Source]:
    """Sources by name; blocks are cut for the longest excerpts that any corpus of them has."""
    opened: dict[str, _Source] = {}
    count = longest - len(leading_tokens(tokenizer))
    if {"reference", "retrieval", "records", "quiz"} & set(names):
        # Prose around hidden facts may be joined, so that it need not be as long as a prompt.
        excerpt = count if "reference" in names else 0
        pieces = _Hashed(unseen_paragraphs())
        prose = read_passages(tokenizer, pieces, excerpt=excerpt, name="reference")
        made_of = (words.LISTS, facts.RELATIONS, facts.CHAINS, facts.RECITALS, forms.PLAIN)
        writer = prompts.RetrievalPrompts(tokenizer, prose, length=length)
        opened["reference"] = _Text(prose, pieces.sha256, tokenizer, length)
        opened["retrieval"] = _Generated(writer, (made_of, pieces.sha256))
        for name, asker in (("records", records.RecordPrompts), ("quiz", records.QuizPrompts)):
            about_records = asker(tokenizer, prose, length=length)
            opened[name] = _Generated(about_records, (records.LISTS, pieces.sha256))
    for name in names:
        if name == "arithmetic":
            solver = prompts.ArithmeticPrompts(tokenizer, length=length)
            opened[name] = _Generated(solver, (words.LISTS, forms.WORKED))
        elif name not in opened:
            texts = _Hashed(read_texts(name))
            passages = read_passages(tokenizer, cut(texts), excerpt=count, name=name)
            opened[name] = _Text(passages, texts.sha256, tokenizer, length)
    return opened


class _Hashed:
    """Texts that are hashed as they pass."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self._digest.update(text.encode())
            self._digest.update(b"\0")
            yield text

    @property
    def sha256(self) -> str:
        """Of all that has passed."""
        return self._digest.hexdigest()
