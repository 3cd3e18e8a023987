"""One batch of samples: what the full cache says, and how far a method's cache is from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.cache import CacheReport, KVCache
from kvfold.errors import KVFoldError
from kvfold.evaluation.batch_decoding import Answer, BatchDecoder, answer_greedily
from kvfold.evaluation.generation import has_end, stop_tokens
from kvfold.evaluation.metering import Metered
from kvfold.evaluation.prompt_batch import PromptBatch
from kvfold.evaluation.sample import Protocol, Sample
from kvfold.ops.divergence import kl_divergence, negative_log_likelihood


@dataclass(frozen=True, slots=True)
class Reference:
    """What the full cache says."""

    prompts: PromptBatch
    """What it has read."""
    forced: torch.Tensor
    """Tokens that follow each prompt, `[B, N]`; any token after a row's end."""
    lengths: list[int]
    """Tokens of each row that count."""
    logits: list[torch.Tensor]
    """After each forced token, `[B, V]`."""
    nll: list[float | None]
    """Nats a token by row, as of a method."""
    answers: list[Answer] | None
    """Its own; None for texts."""
    limit: int
    """Most tokens of an answer."""
    until: tuple[str, ...]
    """Strings that end an answer."""
    report: CacheReport
    """What it held after the prompts."""
    metered: Metered
    """What it took, its own answers included."""

    @property
    def following(self) -> torch.Tensor:
        """Tokens of texts after the first forced one, `[N - 1, B]`; none of answers."""
        return self.forced.T[1:] if self.answers is None else self.forced.T[:0]


@dataclass(frozen=True, slots=True)
class Found:
    """What a method's cache says."""

    divergences: list[list[float]]
    """`KL(full || method)` by row and forced token."""
    agreements: list[list[bool]]
    """Whether both find the same token likeliest, by row and forced token."""
    nll: list[float | None]
    """Mean negative log-likelihood of a text's tokens after the first forced one, in nats, by row;
    None where there are none, and for answers."""
    answers: list[Answer] | None
    """Its own; None for texts."""
    report: CacheReport
    """What it held after the prompts."""
    metered: Metered
    """What it took, the forced tokens included, its own answers not."""

    @classmethod
    def of_full(cls, reference: Reference) -> Found:
        """The full cache is at no distance from itself."""
        return cls(
            [[0.0] * length for length in reference.lengths],
            [[True] * length for length in reference.lengths],
            reference.nll,
            reference.answers,
            reference.report,
            reference.metered,
        )


class BatchRunner:
    """Runs caches over batches of samples, all of a batch of one kind."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        protocol: Protocol = "aware",
    ) -> None:
        """Note what is run.

        Args:
            model: An attached model.
            tokenizer: Its tokenizer.
            protocol: Whether questions are read with the rest or later; all of a batch have one
                length if later.
        """
        self._model, self._tokenizer, self._protocol = model, tokenizer, protocol
        self._stop = stop_tokens(model, tokenizer)
        pad = tokenizer.pad_token_id
        self._pad = pad if isinstance(pad, int) else 0

    def refer(
        self, samples: Sequence[Sample], *, limit: int, until: tuple[str, ...] = ()
    ) -> Reference:
        """Let the full cache read a batch, and continue it.

        Args:
            samples: All of one kind.
            limit: Most tokens of an answer, its own and those of methods that it is compared with.
            until: Strings that end an answer.
        """
        prompts = PromptBatch(
            self._model,
            [sample.prompt for sample in samples],
            pad=self._pad,
            question=samples[0].question if self._protocol == "agnostic" else 0,
        )
        decoder = prompts.decoder()
        report = decoder.cache.report()
        follow = [sample.continuation or [] for sample in samples]
        answers = None
        if samples[0].kind == "text":
            forced = torch.tensor(follow, device=self._model.device)
            logits = [decoder.feed(tokens) for tokens in forced.T]
            lengths = list(map(len, follow))
            pairs = zip(logits, forced.T[1:], strict=False)
            nll = _means([negative_log_likelihood(*pair) for pair in pairs], len(samples))
        else:
            answers, logits = self._answer(decoder, limit, until)
            rows = [answer.tokens + [self._pad] * len(logits) for answer in answers]
            forced = torch.tensor([row[: len(logits)] for row in rows], device=self._model.device)
            lengths = [len(answer.tokens) for answer in answers]
            nll = _means([], len(samples))
        return Reference(
            prompts, forced, lengths, logits, nll, answers, limit, until, report, decoder.metered()
        )

    def compare(self, cache: KVCache, reference: Reference) -> Found:
        """Let a method's cache hold the batch, and force what the full cache has seen.

        Args:
            cache: Empty; it is used up.
            reference: What the full cache says of the batch.

        Raises:
            KVFoldError: When the model gives no numbers.
        """
        decoder = reference.prompts.tell(cache)
        report = decoder.cache.report()
        free = decoder.fork() if reference.answers else None
        said, distances, nats = [decoder.logits.argmax(dim=-1)], [], []
        following = reference.following
        for step, expected in enumerate(reference.logits):
            logits = decoder.feed(reference.forced[:, step])
            said.append(logits.argmax(dim=-1))
            distances.append(kl_divergence(expected, logits))
            if step < len(following):
                nats.append(negative_log_likelihood(logits, following[step]))
        found = torch.stack(said, dim=1)
        divergences, agreements = self._cut(reference, distances, found)
        answers = None
        if free is not None and reference.answers is not None:
            answers = self._answers(free, reference, found.tolist())
        nll = _means(nats, len(reference.lengths))
        return Found(divergences, agreements, nll, answers, report, decoder.metered())

    def _cut(
        self, reference: Reference, distances: list[torch.Tensor], found: torch.Tensor
    ) -> tuple[list[list[float]], list[list[bool]]]:
        """Leave out what stands after a row's end."""
        if not distances:
            nothing = [[] for _ in reference.lengths]
            return nothing, list(nothing)
        kl = torch.stack(distances, dim=1)
        likeliest = torch.stack([each.argmax(dim=-1) for each in reference.logits], dim=1)
        rows = zip(
            kl.tolist(), (found[:, 1:] == likeliest).tolist(), reference.lengths, strict=True
        )
        cut = [(each[:length], same[:length]) for each, same, length in rows]
        _require_numbers(number for numbers, _ in cut for number in numbers)
        return [numbers for numbers, _ in cut], [same for _, same in cut]

    def _answers(
        self, decoder: BatchDecoder, reference: Reference, found: list[list[int]]
    ) -> list[Answer]:
        """The method's answers; only the rows that leave the full cache's have to be decoded."""
        expected = reference.answers or []
        answers = list(expected)
        rows = [
            row
            for row, (answer, tokens) in enumerate(zip(expected, found, strict=True))
            if not self._is_said(answer, tokens, reference.until)
        ]
        if rows:
            decoder.select(rows)
            own, _ = self._answer(decoder, reference.limit, reference.until)
            for row, answer in zip(rows, own, strict=True):
                answers[row] = answer
        return answers

    def _is_said(self, answer: Answer, found: list[int], until: tuple[str, ...]) -> bool:
        """Whether tokens found likeliest, one after the other, are an answer and its end."""
        length = len(answer.tokens)
        is_ended = has_end(self._tokenizer, answer.tokens, until)
        ends = answer.is_cut or is_ended or found[length] in self._stop
        return found[:length] == answer.tokens and ends

    def _answer(
        self, decoder: BatchDecoder, limit: int, until: tuple[str, ...]
    ) -> tuple[list[Answer], list[torch.Tensor]]:
        is_done = partial(has_end, self._tokenizer, stops=until)
        return answer_greedily(decoder, limit=limit, stop=self._stop, is_done=is_done)


def _means(nats: Sequence[torch.Tensor], rows: int) -> list[float | None]:
    """Mean over tokens by row; None where there are no tokens."""
    if not nats:
        return [None] * rows
    means = torch.stack(list(nats)).mean(dim=0).tolist()
    _require_numbers(means)
    return means


def _require_numbers(numbers: Iterable[float]) -> None:
    if not all(map(math.isfinite, numbers)):
        raise KVFoldError(
            "the model gives logits that are not numbers: give another --dtype, such as float32"
        )
