"""One pair and one text, on which ways to hand a prefix over are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from transformers import PreTrainedModel

from kvfold.cache import KVCache, prefill
from kvfold.ops.divergence import kl_divergence
from kvfold.transfer.assemble import full_cache
from kvfold.transfer.baselines import BASELINES, Baseline, HandedOver, hand_over_by
from kvfold.transfer.codec import Codec
from kvfold.transfer.endpoint import Endpoint
from kvfold.transfer.ends import Arrival, Receiver, Sender
from kvfold.transfer.entrant import OWN, Entrant
from kvfold.transfer.pace import send_paced
from kvfold.transfer.wire import Header, MessageReader, read_message

Runner = Callable[[bool], None]
"""Measures a subject once; told whether it counts."""


class Track:
    """A pair, a text, and what was measured on it.

    The consumer gets all of the prefix but its last token, which it computes itself.
    """

    def __init__(
        self,
        producer: PreTrainedModel,
        consumer: PreTrainedModel,
        text: torch.Tensor,
        continuation: int,
        bandwidths: tuple[float, ...],
    ) -> None:
        """Look at both models, and let the consumer read the prefix.

        Args:
            producer: Reads prefixes.
            consumer: Goes on from them; attached.
            text: Prefix and continuation, `[T]`.
            continuation: How many of its last tokens are no prefix.
            bandwidths: Bits a second.
        """
        self._producer, self._consumer = Endpoint(producer), Endpoint(consumer)
        ids = text[None].to(consumer.device)
        self._prefix, self._rest = ids[:, :-continuation], ids[:, -continuation:]
        self._head, self._last = self._prefix[:, :-1], self._prefix[:, -1:]
        self._bandwidths = bandwidths
        own = full_cache(consumer)
        prefill(consumer, self._prefix, own)
        self._reference = self._continued(own)
        self.entrants = {OWN: self._entrant(0, self._reference)}
        """By subject."""

    def subjects(self, codecs: Mapping[str, Codec]) -> dict[str, Runner]:
        """What measures each subject once.

        Raises:
            ArtifactError: When a codec is of another pair.
        """
        runners: dict[str, Runner] = {OWN: self._run_own}
        for name, codec in codecs.items():
            ends = codec.sender(self._producer.model), codec.receiver(self._consumer.model)
            runners[name] = partial(self._run_codec, name, *ends)
        for baseline in BASELINES:
            if baseline != "oracle":
                runners[baseline] = partial(self._run_baseline, baseline, self._handed(baseline))
        return runners

    # One turn ---------------------------------------------------------------------------------

    def _run_own(self, counted: bool) -> None:
        seconds: dict[str, float] = {}
        with self._timed(seconds, "prefill"):
            prefill(self._consumer.model, self._prefix, full_cache(self._consumer.model))
        self._note(OWN, seconds, {}, counted)

    def _run_codec(self, name: str, sender: Sender, receiver: Receiver, counted: bool) -> None:
        seconds: dict[str, float] = {}
        pieces = sender.pieces(self._head.to(self._producer.model.device))
        with self._timed(seconds, "prefill"):
            # The reading is done before the first piece is there.
            start = next(pieces)
        with self._timed(seconds, "encode"):
            message = b"".join([start, *pieces])
        sending = {each: send_paced(message, each) for each in self._bandwidths}
        cache = self._decoded(receiver, message, seconds)
        with self._timed(seconds, "first token"):
            prefill(self._consumer.model, self._last, cache)
        if name not in self.entrants:
            self.entrants[name] = self._entrant(len(message), self._continued(cache))
        self._note(name, seconds, sending, counted)

    def _run_baseline(self, name: str, handed: HandedOver, counted: bool) -> None:
        seconds: dict[str, float] = {}
        with self._timed(seconds, "prefill"):
            self._producer.read(self._head.to(self._producer.model.device))
        sending = {each: send_paced(bytes(handed.payload), each) for each in self._bandwidths}
        cache = handed.cache.fork()
        with self._timed(seconds, "first token"):
            prefill(self._consumer.model, self._last, cache)
        if name not in self.entrants:
            self.entrants[name] = self._entrant(handed.payload, self._continued(cache))
        self._note(name, seconds, sending, counted)

    def _decoded(self, receiver: Receiver, message: bytes, seconds: dict[str, float]) -> KVCache:
        """The cache of a message; what patched layers took is told apart."""
        reader, patched = MessageReader(), set(receiver.codec.patched)
        arrival: Arrival | None = None
        with self._timed(seconds, "decode"):
            for piece in read_message(message, reader):
                if isinstance(piece, Header):
                    arrival = receiver.begin(piece, reader, ids=self._head)
                    continue
                assert arrival is not None
                if piece.layer in patched:
                    with self._timed(seconds, "patch"):
                        arrival.take(piece)
                else:
                    arrival.take(piece)
            assert arrival is not None
            cache = arrival.finish()
        seconds["decode"] -= seconds.setdefault("patch", 0.0)
        return cache

    def _handed(self, name: Baseline) -> HandedOver:
        layers = len(self._consumer.layers)
        # A third of the layers, in the middle, where the paper's selective recompute has most.
        middle = range(layers // 3, max(2 * layers // 3, layers // 3 + 1))
        return hand_over_by(name, self._producer, self._consumer, self._head, layers=middle)

    # What is noted ----------------------------------------------------------------------------

    @contextmanager
    def _timed(self, seconds: dict[str, float], stage: str) -> Iterator[None]:
        """Add what a stage takes, to the end of what it asked an accelerator to do."""
        self._wait()
        begin = time.perf_counter()
        yield
        self._wait()
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - begin

    def _wait(self) -> None:
        for end in (self._producer, self._consumer):
            if end.model.device.type == "cuda":
                torch.cuda.synchronize(end.model.device)

    def _note(
        self, name: str, seconds: dict[str, float], sending: dict[float, float], counted: bool
    ) -> None:
        if not counted:
            return
        entrant = self.entrants[name]
        for stage, took in seconds.items():
            entrant.seconds.setdefault(stage, []).append(took)
        for bandwidth, took in sending.items():
            entrant.sending.setdefault(bandwidth, []).append(took)

    @torch.no_grad()
    def _continued(self, cache: KVCache) -> torch.Tensor:
        """Logits `[1, C, V]` of the continuation, after a cache of the whole prefix."""
        return self._consumer.continued(cache, self._rest)

    def _entrant(self, payload: int, logits: torch.Tensor) -> Entrant:
        found = logits[0, :-1].float().log_softmax(-1).gather(-1, self._rest[0, 1:, None])
        divergence = float(kl_divergence(self._reference, logits).mean())
        return Entrant(payload, divergence, float((-found.mean()).exp()))
