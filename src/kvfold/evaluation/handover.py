"""What a consumer answers over a prefix that was handed over, one way beside the other.

Held-out items are passages and questions. The consumer's own prefill is the oracle: it answers, and
its answer is forced into every other way's cache, whose predictions are compared with its own; each
way then answers by itself. The producer alone, which knows nothing of the task, is told as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache import CACHE_KEYWORD, KVCache, prefill
from kvfold.errors import ConfigError
from kvfold.evaluation.answers import words_in_common
from kvfold.evaluation.batch_decoding import Answer, BatchDecoder, answer_greedily
from kvfold.evaluation.fidelity_rows import RowStore, key_of
from kvfold.evaluation.generation import stop_tokens
from kvfold.models import fingerprint
from kvfold.ops.divergence import kl_divergence
from kvfold.training.records import LISTS, Item, held_out_items
from kvfold.transfer import BASELINES, Codec, HandedOver, Receiver, Sender, hand_over_by
from kvfold.transfer.baselines import Baseline
from kvfold.transfer.endpoint import Endpoint, Trace

VERSION = 1
"""Of what is measured: rows of another version are not gone on with."""
ORACLE, BASE = "oracle", "base"
"""The consumer's own prefill, and the producer alone."""
_LIMIT = 16
"""Most tokens of an answer."""

Progress = Callable[[str, float], None]
"""Told what is being done, and the share of all that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverSettings:
    """What is asked."""

    items: int = 100
    """Held-out items."""
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    """Tokens of their passages, in turn."""
    seed: int = 0
    """Of the items and of the intervals."""

    def check(self) -> None:
        """Refuse what cannot be asked.

        Raises:
            ConfigError: When a value is out of its range.
        """
        if self.items < 1 or not self.lengths or min(self.lengths) < 1:
            raise ConfigError(
                f"{self.items} items of {self.lengths} tokens: give at least 1 of each"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverRow:
    """One item, one way."""

    key: str
    """Hash of all that the numbers depend on."""
    index: int
    """The item's place."""
    tokens: int
    """Of the prefix."""
    way: str
    """How it was handed over."""
    payload: int
    """Bytes that travelled."""
    raw: int
    """Bytes of the raw cache in bfloat16."""
    divergence: float
    """Mean KL from the oracle's predictions of its own answer and of its end, in nats."""
    expected: str
    """The right answer."""
    answer: str
    """Greedy."""
    f1: float
    """Of its words."""
    is_exact: bool
    """Whether it is the right one to the last sign, but for blanks."""

    def to_dict(self) -> dict[str, object]:
        """The row as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, object]) -> HandoverRow:
        """Read what `to_dict` wrote."""
        values = {field.name: document[field.name] for field in fields(cls)}
        return cls(**values)  # pyright: ignore[reportArgumentType]


def measure_handover(
    producer: PreTrainedModel,
    consumer: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    codecs: Mapping[str, Codec],
    settings: HandoverSettings,
    folder: Path,
    *,
    resume: bool = False,
    on_progress: Progress | None = None,
) -> list[HandoverRow]:
    """Let a consumer answer held-out items over prefixes that were handed over in several ways.

    Args:
        producer: Reads prefixes; attached.
        consumer: Answers; attached.
        tokenizer: Of both.
        codecs: By name; all of this pair.
        settings: What is asked.
        folder: Where rows are kept, so that the same call goes on where it stopped.
        resume: Go on with the rows that are there.
        on_progress: Told about every item.

    Returns:
        A row for each item and way, item by item.

    Raises:
        ConfigError: When a setting is out of its range, or the folder holds results.
        ArtifactError: When a codec is of another pair, or the rows cannot be read.
    """
    settings.check()
    stage = _Stage(producer, consumer, tokenizer, codecs)
    store = RowStore(folder, HandoverRow.from_dict, resume=resume)
    found: list[HandoverRow] = []
    items = islice(held_out_items(tokenizer, settings.lengths, settings.seed), settings.items)
    for index, item in enumerate(items):
        keys = stage.keys(settings.seed, index, item)
        missing = {way: key for way, key in keys.items() if store.find(key) is None}
        if missing:
            store.add(stage.rows(index, item, missing))
        found += [row for key in keys.values() if (row := store.find(key)) is not None]
        if on_progress is not None:
            done = index + 1
            on_progress(_told(found, done, settings.items), done / settings.items)
    return found


def _told(rows: Sequence[HandoverRow], done: int, total: int) -> str:
    """A line on where it stands, with the F1 so far."""
    ways = dict.fromkeys(row.way for row in rows)
    means = ", ".join(
        f"{way} {sum(row.f1 for row in rows if row.way == way) / done:.2f}" for way in ways
    )
    return f"item {done} of {total}: F1 {means}"


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """What the oracle says of an item."""

    question: torch.Tensor
    """`[1, Q]`."""
    forced: torch.Tensor
    """The question and the oracle's answer, `[1, Q + A]`."""
    logits: torch.Tensor
    """After the question and each token of the answer, `[1, A + 1, V]`."""
    answer: Answer
    """The oracle's."""


class _Stage:
    """A pair, its codecs, and the items that it is asked."""

    def __init__(
        self,
        producer: PreTrainedModel,
        consumer: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        codecs: Mapping[str, Codec],
    ) -> None:
        self._producer, self._consumer = Endpoint(producer), Endpoint(consumer)
        self._tokenizer, self._codecs = tokenizer, codecs
        self._ends: dict[str, tuple[Sender, Receiver]] = {
            name: (codec.sender(producer), codec.receiver(consumer))
            for name, codec in codecs.items()
        }
        count = len(self._consumer.layers)
        # A third of the layers, in the middle, where the paper's selective recompute has most.
        self._middle = range(count // 3, max(2 * count // 3, count // 3 + 1))
        self._hidden = sorted({layer for codec in codecs.values() for layer in codec.patched})
        self._models = [fingerprint(producer), fingerprint(consumer)]
        self._stops = {
            end: stop_tokens(end.model, tokenizer) for end in (self._producer, self._consumer)
        }

    def keys(self, seed: int, index: int, item: Item) -> dict[str, str]:
        """The key of each way's row."""
        facts = {
            "version": VERSION,
            "models": self._models,
            "dtype": str(self._consumer.model.dtype),
            "item": [seed, index, item.passage, item.question, item.answer],
            "lists": repr(LISTS),
        }
        ways = [*BASELINES[:1], BASE, *BASELINES[1:]]
        digests = {name: codec.digest for name, codec in self._codecs.items()}
        return {
            way: key_of(facts | {"way": way, "codec": digests.get(way)})
            for way in (*ways, *digests)
        }

    def rows(self, index: int, item: Item, keys: Mapping[str, str]) -> list[HandoverRow]:
        """What some ways, given with their keys, give on an item."""
        ids = self._row(item.passage)
        heard = self._producer.read(ids, hidden=self._hidden, residual=self._middle[:1])
        oracle = self._by("oracle", ids, None)
        reference = self._refer(oracle.cache, item)
        raw = self._by("raw", ids, heard)
        found = []
        for way, key in keys.items():
            end = self._producer if way == BASE else self._consumer
            handed = {ORACLE: oracle, "raw": raw}.get(way) or self._handed(way, ids, heard)
            divergence, tokens = self._judged(end, handed.cache, reference)
            text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
            found.append(
                HandoverRow(
                    key=key,
                    index=index,
                    tokens=len(item.passage),
                    way=way,
                    payload=handed.payload,
                    raw=raw.payload,
                    divergence=divergence,
                    expected=item.answer,
                    answer=text,
                    f1=words_in_common(item.answer, text),
                    is_exact=text.split() == item.answer.split(),
                )
            )
        return found

    def _handed(self, way: str, ids: torch.Tensor, heard: Trace) -> HandedOver:
        if way == BASE:
            return hand_over_by("oracle", self._producer, self._producer, ids, trace=heard)
        if way not in self._ends:
            return self._by(way, ids, heard)
        sender, receiver = self._ends[way]
        message = b"".join(sender.told(heard, ids))
        return HandedOver(receiver.decode(message, ids=ids), len(message))

    def _by(self, way: str, ids: torch.Tensor, heard: Trace | None) -> HandedOver:
        ends, name = (self._producer, self._consumer), cast("Baseline", way)
        return hand_over_by(name, *ends, ids, layers=self._middle, trace=heard)

    def _refer(self, cache: KVCache, item: Item) -> _Reference:
        """Let the oracle answer, and note what it finds likely on the way."""
        question = self._row(item.question)
        answer = self._answer(self._consumer, cache, question)
        forced = torch.cat([question, self._row(answer.tokens)], 1)
        logits = _logits(self._consumer, cache, forced, len(answer.tokens) + 1)
        return _Reference(question, forced, logits, answer)

    def _judged(
        self, end: Endpoint, cache: KVCache, reference: _Reference
    ) -> tuple[float, list[int]]:
        """Divergence from the oracle, and the answer of a model over a cache of the prefix."""
        said = reference.answer.tokens
        after = _logits(end, cache, reference.forced, len(said) + 1)
        divergence = float(kl_divergence(reference.logits, after).mean())
        *likeliest, last = after[0].argmax(-1).tolist()
        if likeliest == said and (reference.answer.is_cut or last in self._stops[end]):
            # Every token of the oracle's answer is the likeliest: it is this one's answer too.
            return divergence, said
        return divergence, self._answer(end, cache, reference.question).tokens

    def _answer(self, end: Endpoint, cache: KVCache, question: torch.Tensor) -> Answer:
        """What a model finds likeliest, token by token; the cache is left as it was."""
        own = cache.fork()
        decoder = BatchDecoder(end.model, own, prefill(end.model, question, own), None)
        answers, _ = answer_greedily(decoder, limit=_LIMIT, stop=self._stops[end])
        return answers[0]

    def _row(self, tokens: list[int]) -> torch.Tensor:
        """Tokens as `[1, N]`, where the consumer is."""
        return torch.tensor([tokens], dtype=torch.long, device=self._consumer.model.device)


@torch.no_grad()
def _logits(end: Endpoint, cache: KVCache, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Logits after the last of tokens `[1, N]`, `[1, count, V]`; the cache is left as it was."""
    start = cache.get_seq_length()
    output = end.model(
        input_ids=tokens,
        position_ids=torch.arange(start, start + tokens.shape[1], device=tokens.device)[None],
        use_cache=True,
        logits_to_keep=count,
        **{CACHE_KEYWORD: cache.fork()},
    )
    return output.logits
