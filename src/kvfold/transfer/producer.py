"""A producer on the network: it reads prefixes once, and hands their codes to whoever asks.

One connection carries one request. Prefixes are read one after the other in a thread of their own;
those who ask for the same at the same time wait for one reading, and what nobody waits for any more
is not begun. Every step has a deadline, so that a client that sends or takes its bytes slowly costs
no more than its connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

from kvfold.errors import ConfigError, KVFoldError, TransferError
from kvfold.transfer.ends import Sender
from kvfold.transfer.protocol import Request, pack_refusal, read_request
from kvfold.transfer.store import CodeStore, Message
from kvfold.transfer.wire import ids_digest

_LOGGER = logging.getLogger(__name__)

Key = tuple[str, str]
"""Digests of a codec and of a prefix's token ids."""

_T = TypeVar("_T")

_SHORTEST_WAIT = 0.1
"""Seconds between two looks at what is kept too long, at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """How a producer serves."""

    host: str = "127.0.0.1"
    """Address to listen at; others than this machine's own need a key or TLS."""
    port: int = 0
    """Port to listen at; 0 takes a free one."""
    connections: int = 256
    """Clients served at a time; more are refused at once."""
    prefixes: int = 64
    """Read or waited for at a time; requests for more are refused at once."""
    request_seconds: float = 5.0
    """In which a request must have come."""
    encode_seconds: float = 120.0
    """In which its codes must be there, the wait for others' included."""
    send_seconds: float = 60.0
    """In which the client must have taken them."""
    request_bytes: int = 2**22
    """Of a request at most."""
    tokens: int = 2**17
    """Of a request at most, over all rows, each padded to the longest."""
    bytes_kept: int = 2**28
    """Of codes that are kept for those who ask again."""
    seconds_kept: float = 600.0
    """That codes are kept; up to a tenth longer while nobody asks."""


@dataclass(slots=True)
class ServiceCounts:
    """What a producer has done."""

    requests: int = 0
    """Connections accepted."""
    served: int = 0
    """Messages sent whole."""
    encoded: int = 0
    """Prefixes read."""
    refused: int = 0
    """Requests refused: bad, late, or one too many."""
    broken: int = 0
    """Connections that ended before the message was sent."""
    bytes_sent: int = 0
    """Of messages."""

    def to_dict(self) -> dict[str, int]:
        """The counts as plain data."""
        return asdict(self)


@dataclass(slots=True, eq=False)
class _Reading:
    """A prefix that is read or waits for it."""

    work: Future[Message]
    task: asyncio.Task[Message]
    waiters: int = 0


class Producer:
    """Serves the codes of one producer model, for any number of codecs.

    Example:
        >>> async with Producer([codec.sender(base)]) as producer:  # doctest: +SKIP
        ...     print(producer.port)
        ...     await asyncio.Event().wait()
    """

    def __init__(
        self,
        senders: Sequence[Sender],
        settings: ServiceSettings | None = None,
        *,
        key: bytes | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Get ready; `start` opens the port.

        Args:
            senders: One for each codec that is served.
            settings: How; the defaults without it.
            key: Shared with the consumers: seals messages, and requests without it are refused.
            tls: Server's context; plain TCP without it.

        Raises:
            ConfigError: When the address is not this machine's own and neither key nor TLS is
                given, or the key is empty.
        """
        self._settings = ServiceSettings() if settings is None else settings
        if key is not None and not key:
            raise ConfigError("the shared key is empty: give some random bytes, or None")
        check_reach(self._settings.host, key, tls)
        self._senders = {sender.codec.digest: sender for sender in senders}
        self._key, self._tls = key, tls
        self.store = CodeStore(self._settings.bytes_kept, self._settings.seconds_kept)
        """Codes that are kept."""
        self.counts = ServiceCounts()
        """What was done."""
        self._waiting: dict[Key, _Reading] = {}
        self._clients: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvfold-producer")
        self._server: asyncio.Server | None = None
        self._expiring: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Port that is listened at."""
        assert self._server is not None, "the producer is started"
        return self._server.sockets[0].getsockname()[1]

    async def start(self) -> None:
        """Open the port.

        Raises:
            ConfigError: When it cannot be opened.
        """
        settings = self._settings
        try:
            self._server = await asyncio.start_server(
                self._accept, settings.host, settings.port, ssl=self._tls
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {settings.host}:{settings.port} ({error.strerror or error}): "
                "choose another address or port"
            ) from error
        self._expiring = asyncio.create_task(self._expire())

    async def close(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        tasks = [*self._clients, *(reading.task for reading in self._waiting.values())]
        tasks += [] if self._expiring is None else [self._expiring]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Producer:
        """The producer, started."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close, whatever happened."""
        await self.close()

    # One connection ---------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        self.counts.requests += 1
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.TimeoutError):
            self.counts.broken += 1
        finally:
            self._clients.discard(task)
            # What a slow client has not taken is not waited for.
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._clients) > self._settings.connections:
                raise TransferError("the producer serves too many clients: ask again later")
            message = await self._answer(reader)
        except KVFoldError as error:
            self.counts.refused += 1
            _LOGGER.warning("refused a request: %s", error)
            await self._send(writer, (pack_refusal(str(error), self._key),))
            return
        await self._send(writer, message)
        self.counts.served += 1
        self.counts.bytes_sent += sum(map(len, message))

    async def _answer(self, reader: asyncio.StreamReader) -> Message:
        settings = self._settings
        reading = read_request(reader, self._key, settings.request_bytes)
        request = await _within(settings.request_seconds, reading, "the request did not come")
        key = self._check(request)
        found = self.store.get(key)
        if found is not None:
            return found
        read = self._join(key, request)
        try:
            waiting = _while_there(reader, read.task)
            return await _within(settings.encode_seconds, waiting, "the codes were not ready")
        finally:
            self._leave(key, read)

    async def _send(self, writer: asyncio.StreamWriter, message: Message) -> None:
        async def send() -> None:
            for piece in message:
                writer.write(piece)
                await writer.drain()
            writer.close()
            await writer.wait_closed()

        await asyncio.wait_for(send(), self._settings.send_seconds)

    def _check(self, request: Request) -> Key:
        sender = self._senders.get(request.codec)
        if sender is None:
            raise TransferError("the producer does not have this codec: give both sides the same")
        if request.tokenizer != sender.codec.tokenizer:
            raise TransferError("the consumer has another tokenizer: give both sides the same")
        longest, most = max(map(len, request.rows)), self._settings.tokens
        tokens = longest * len(request.rows)
        if tokens > most:
            raise TransferError(f"the request has {tokens} tokens, more than the {most} taken")
        anatomy = sender.endpoint.anatomy
        if max(map(max, request.rows)) >= anatomy.vocabulary:
            raise TransferError(
                f"the request has token ids beyond the producer's {anatomy.vocabulary}: give both "
                "sides the same tokenizer"
            )
        limit = anatomy.max_positions
        if limit is not None and longest > limit:
            raise TransferError(
                f"{longest} tokens are more than the producer's {limit} positions: shorten the "
                "prefix"
            )
        return request.codec, ids_digest(*request.batch())

    # Codes ------------------------------------------------------------------------------------

    def _join(self, key: Key, request: Request) -> _Reading:
        """Wait for the reading of a prefix: one for all who ask for it meanwhile."""
        reading = self._waiting.get(key)
        if reading is None:
            if len(self._waiting) >= self._settings.prefixes:
                raise TransferError("too many prefixes wait to be read: ask again later")
            work = self._thread.submit(self._work, request)
            reading = _Reading(work, asyncio.create_task(self._encode(key, work)))
            self._waiting[key] = reading
            reading.task.add_done_callback(lambda done: self._done(key, done))
        reading.waiters += 1
        return reading

    def _leave(self, key: Key, reading: _Reading) -> None:
        """Wait no more; a reading that was begun goes on, for those who ask again."""
        reading.waiters -= 1
        if reading.waiters == 0 and reading.work.cancel():
            # Whoever asks before the task has ended needs another.
            self._waiting.pop(key, None)

    def _done(self, key: Key, task: asyncio.Task[Message]) -> None:
        reading = self._waiting.get(key)
        if reading is not None and reading.task is task:
            del self._waiting[key]
        # Nobody may be left who would hear of a failure.
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOGGER.warning("a prefix could not be read: %s", error)

    def _work(self, request: Request) -> Message:
        sender, (ids, mask) = self._senders[request.codec], request.batch()
        return tuple(sender.pieces(ids, mask=mask, key=self._key))

    async def _encode(self, key: Key, work: Future[Message]) -> Message:
        try:
            message = await asyncio.wrap_future(work)
        except RuntimeError as error:
            raise TransferError(f"the producer failed to read the prefix ({error})") from error
        self.counts.encoded += 1
        self.store.put(key, message)
        return message

    async def _expire(self) -> None:
        """Let codes go in time though nobody asks."""
        while True:
            await asyncio.sleep(max(_SHORTEST_WAIT, self._settings.seconds_kept / 10))
            self.store.expire()


async def _while_there(reader: asyncio.StreamReader, task: asyncio.Task[Message]) -> Message:
    """What a task gives, which goes on without those who wait for it.

    Raises:
        ConnectionResetError: When the client leaves before, or says more than its request.
    """
    leaving = asyncio.create_task(_left(reader))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionResetError("the client left")
        return task.result()
    finally:
        leaving.cancel()


async def _left(reader: asyncio.StreamReader) -> None:
    """End when a client does, or says anything."""
    with suppress(OSError):
        await reader.read(1)


async def _within(seconds: float, work: Awaitable[_T], meaning: str) -> _T:
    """The result of an awaitable that has so long.

    Raises:
        TransferError: When it took longer.
    """
    try:
        return await asyncio.wait_for(work, seconds)
    except asyncio.TimeoutError as error:
        raise TransferError(f"{meaning} within {seconds:g} s: ask again") from error


def check_reach(host: str, key: bytes | None, tls: ssl.SSLContext | None) -> None:
    """Refuse to serve other machines without a secret.

    Raises:
        ConfigError: When the address is not this machine's own and neither is given.
    """
    if not _is_own(host) and key is None and tls is None:
        raise ConfigError(
            f"serving at {host} reaches other machines: give a shared key or TLS, or serve at "
            "127.0.0.1"
        )


def _is_own(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
