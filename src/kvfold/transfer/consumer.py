"""A consumer on the network: it asks for a prefix's codes, and can always do without.

Whatever goes wrong (nobody there, too late, cut off, altered, of another codec, no memory left to
decode) ends in the consumer reading the prefix itself; it says so in the log, in the answer, and
counts it. A cache is handed out only when every layer came whole.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch

from kvfold.cache import KVCache, prefill
from kvfold.errors import ConfigError, TransferError
from kvfold.transfer.assemble import full_cache
from kvfold.transfer.ends import Arrival, Receiver, require_rows
from kvfold.transfer.pour import require_pourable
from kvfold.transfer.protocol import (
    REFUSAL,
    pack_request,
    read_exactly,
    read_refusal,
    request_of,
)
from kvfold.transfer.wire import Frame, Header, Limits, MessageReader

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """Whom a consumer asks, and how long it waits."""

    host: str = "127.0.0.1"
    """Address of the producer."""
    port: int
    """Port of the producer."""
    connect_seconds: float = 2.0
    """In which the connection must be there."""
    answer_seconds: float = 60.0
    """In which the whole message must have come, from the request on."""
    server_name: str | None = None
    """Name in the producer's certificate, where it is not the address."""
    limits: Limits = field(default_factory=Limits)
    """What is taken at most."""

    def __post_init__(self) -> None:
        """Refuse a port that nobody can listen at."""
        if not 0 < self.port < 2**16:
            raise ConfigError(f"port {self.port} is none: give the producer's, from 1 to 65535")


@dataclass(slots=True)
class Stages:
    """Seconds of a question by what the consumer did, one after the other.

    A stage that failed counts as far as it came. Where the consumer's device computes behind the
    program's back, what is left of its work is waited for by whoever uses the cache.
    """

    connect: float = 0.0
    """Until the connection was there."""
    wait: float = 0.0
    """From the request to the first bytes of what was answered; the producer's reading is in it."""
    receive: float = 0.0
    """Waiting for the bytes after these; those that come while others are decoded cost nothing."""
    decode: float = 0.0
    """Checking what has come, and making keys and values of it."""
    read: float = 0.0
    """Reading the prefix itself."""

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of what is done inside to the stage of that name, even when it fails."""
        begin = time.monotonic()
        try:
            yield
        finally:
            setattr(self, stage, getattr(self, stage) + time.monotonic() - begin)

    def to_dict(self) -> dict[str, float]:
        """The seconds as plain data."""
        return asdict(self)


@dataclass(slots=True, eq=False)
class _Question:
    """A prefix that is asked for, and what came of its message."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    into: KVCache | None
    received: int = 0
    stages: Stages = field(default_factory=Stages)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A prefix's cache, and where it is from."""

    cache: KVCache
    """Has seen the whole prefix."""
    source: Literal["producer", "own"]
    """Decoded from the producer's codes, or read by the consumer itself."""
    reason: str | None
    """Why the consumer read it itself."""
    bytes_received: int
    """Of the message, as far as it came."""
    seconds: float
    """From the question to the cache."""
    stages: Stages
    """What they were spent on."""


@dataclass(slots=True)
class ConsumerCounts:
    """What a consumer has done."""

    asked: int = 0
    """Prefixes asked for."""
    received: int = 0
    """Of these, decoded from codes."""
    own: int = 0
    """Of these, read by itself."""
    bytes_received: int = 0
    """Of messages."""

    def to_dict(self) -> dict[str, int]:
        """The counts as plain data."""
        return asdict(self)


class Consumer:
    """Gets caches of prefixes for one consumer model.

    Example:
        >>> settings = ConsumerSettings(port=8471)  # doctest: +SKIP
        >>> consumer = Consumer(codec.receiver(model), settings)  # doctest: +SKIP
        >>> answer = consumer.prefix(ids)  # doctest: +SKIP
        >>> model.generate(prompt, cache=answer.cache)  # doctest: +SKIP
    """

    def __init__(
        self,
        receiver: Receiver,
        settings: ConsumerSettings,
        *,
        key: bytes | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Get ready; nothing is connected yet.

        Args:
            receiver: The consumer's end of the codec.
            settings: Whom to ask.
            key: Shared with the producer.
            tls: Client's context; plain TCP without it.

        Raises:
            ConfigError: When the key is empty.
        """
        if key is not None and not key:
            raise ConfigError("the shared key is empty: give some random bytes, or None")
        self._receiver, self._settings, self._key, self._tls = receiver, settings, key, tls
        self.counts = ConsumerCounts()
        """What was done."""

    def prefix(
        self,
        ids: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        into: KVCache | None = None,
    ) -> Answer:
        """`ask`, for those who do not run an event loop."""
        return asyncio.run(self.ask(ids, mask=mask, into=into))

    async def ask(
        self,
        ids: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        into: KVCache | None = None,
    ) -> Answer:
        """The cache of a prefix: the producer's if it can be had in time, else the consumer's own.

        Args:
            ids: Token ids of the prefix, `[B, T]`, left padded.
            mask: False for padding, `[B, T]`.
            into: An empty cache to be filled, from codes or by the consumer's own reading; see
                `Receiver.decode`.

        Returns:
            The cache; see `Receiver.decode` for how to go on with it.

        Raises:
            ConfigError: For more tokens than the model has positions, or none, for a mask that
                does not fit or pads on the right, or when `into` cannot be filled from codes.
        """
        require_rows(ids, mask)
        if into is not None:
            require_pourable(into, self._receiver.endpoint)
        started = time.monotonic()
        self.counts.asked += 1
        question = _Question(ids, mask, into)
        try:
            cache, reason = await self._receive(question), None
            self.counts.received += 1
        except asyncio.TimeoutError:
            cache, reason = None, f"no whole answer within {self._settings.answer_seconds:g} s"
        except (TransferError, OSError, OverflowError, RuntimeError) as error:
            cache, reason = None, str(error) or type(error).__name__
        if cache is None:
            _LOGGER.warning("the consumer reads the prefix itself: %s", reason)
            self.counts.own += 1
            with question.stages.timed("read"):
                cache = await asyncio.get_running_loop().run_in_executor(
                    None, self._read, ids, mask, into
                )
        return Answer(
            cache,
            "producer" if reason is None else "own",
            reason,
            question.received,
            time.monotonic() - started,
            question.stages,
        )

    def _read(
        self, ids: torch.Tensor, mask: torch.Tensor | None, into: KVCache | None = None
    ) -> KVCache:
        model = self._receiver.endpoint.model
        cache = full_cache(model) if into is None else into
        attended = None if mask is None else mask.long().to(model.device)
        prefill(model, ids.to(model.device), cache, attention_mask=attended)
        return cache

    async def _receive(self, question: _Question) -> KVCache:
        settings = self._settings
        connecting = asyncio.open_connection(
            settings.host,
            settings.port,
            ssl=self._tls,
            server_hostname=settings.server_name if self._tls else None,
            limit=2**20,
        )
        try:
            with question.stages.timed("connect"):
                reader, writer = await asyncio.wait_for(connecting, settings.connect_seconds)
        except asyncio.TimeoutError as error:
            raise TransferError(
                f"no connection to {settings.host}:{settings.port} within "
                f"{settings.connect_seconds:g} s"
            ) from error
        try:
            exchange = self._exchange(reader, writer, question)
            return await asyncio.wait_for(exchange, settings.answer_seconds)
        finally:
            writer.transport.abort()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        question: _Question,
    ) -> KVCache:
        codec, ids, mask = self._receiver.codec, question.ids, question.mask
        stages, stage = question.stages, "wait"
        with stages.timed("wait"):
            request = request_of(codec.digest, codec.tokenizer, ids, mask)
            writer.write(pack_request(request, self._key))
            await writer.drain()
        message = MessageReader(key=self._key, limits=self._settings.limits)
        arrival: Arrival | None = None
        loop = asyncio.get_running_loop()
        while message.wanted:
            with stages.timed(stage):
                data = await read_exactly(reader, message.wanted)
            stage = "receive"
            question.received += len(data)
            self.counts.bytes_received += len(data)
            if arrival is None and data.startswith(REFUSAL):
                reason = await read_refusal(reader, data, self._key)
                raise TransferError(f"the producer refused: {reason}")
            with stages.timed("decode"):
                piece = message.take(data)
                if isinstance(piece, Header):
                    arrival = self._receiver.begin(
                        piece, message, ids=ids, mask=mask, into=question.into
                    )
                elif isinstance(piece, Frame):
                    assert arrival is not None
                    # Layers are decoded while the next ones come.
                    await loop.run_in_executor(None, arrival.take, piece)
        assert arrival is not None
        with stages.timed("decode"):
            return arrival.finish()
