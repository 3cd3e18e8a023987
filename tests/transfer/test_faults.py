"""Faults on the way: the consumer reads in time, uses no wrong cache, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvfold.errors import TransferError
from kvfold.transfer.consumer import Consumer, ConsumerSettings
from kvfold.transfer.ends import Receiver, Sender
from kvfold.transfer.producer import Producer, ServiceSettings
from kvfold.transfer.protocol import pack_refusal, pack_request, request_of
from kvfold.transfer.wire import MAGIC
from tests.tiny import tiny_ids
from tests.transfer.codecs import quick_codec
from tests.transfer.pairs import tiny_pair, tiny_texts
from tests.transfer.test_service import IDS, Handler, against, assert_own, damaged, until

OPEN = Path("/dev/fd")
"""Where a system lists what this process has open."""


@pytest.fixture(scope="module")
def ends() -> tuple[Sender, Receiver]:
    base, other = tiny_pair()
    codec = quick_codec(base, other, tiny_texts(4), bits=8, patches=(1,))
    return codec.sender(base), codec.receiver(other)


def reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection off, so that the other side gets no end of it but an error."""
    found = writer.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def saying(data: bytes, after: Callable[[asyncio.StreamWriter], None] | None = None) -> Handler:
    """A server that says so much; then it waits, or does what is given."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(data)
        await writer.drain()
        if after is None:
            await reader.read()
        else:
            after(writer)

    return handler


def dripping(start: bytes, rest: bytes) -> Handler:
    """A server that says how it begins, and then a byte at a time."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(start)
        for byte in rest:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.02)

    return handler


def test_a_producer_that_breaks_off_is_done_without(ends):
    sender, receiver = ends
    pieces = list(sender.pieces(IDS))
    whole = b"".join(pieces)
    for cut in (0, len(pieces[0]) - 1, len(pieces[0]), len(whole) // 2, len(whole) - 1):
        answer, _ = asyncio.run(against(saying(whole[:cut], reset), receiver))
        assert_own(receiver, answer, "")
        assert answer.bytes_received <= cut


def test_a_message_that_drips_in_is_waited_for_no_longer_than_agreed(ends):
    sender, receiver = ends
    start, *rest = sender.pieces(IDS)
    handler = dripping(start, b"".join(rest))
    answer, _ = asyncio.run(against(handler, receiver, answer_seconds=0.3))
    assert_own(receiver, answer, "no whole answer within 0.3 s")
    assert len(start) <= answer.bytes_received < len(start) + 100
    assert answer.seconds - answer.stages.read < 1.5


def test_a_frame_of_a_hostile_size_is_not_waited_for(ends):
    sender, receiver = ends
    start = next(iter(sender.pieces(IDS)))
    for size in (2**28 + 1, 2**63, 2**64 - 1):
        handler = saying(start + struct.pack(">IQ", 0, size))
        answer, _ = asyncio.run(against(handler, receiver, answer_seconds=30))
        assert_own(receiver, answer, f"layer 0 has {size} bytes")
        assert answer.seconds < 15


def test_no_flipped_bit_makes_a_cache(ends):
    sender, receiver = ends
    pieces = list(sender.pieces(IDS))
    whole, chosen = b"".join(pieces), random.Random(0)
    positions = [*range(len(pieces[0])), *chosen.sample(range(len(pieces[0]), len(whole)), 200)]
    for position in positions:
        flipped = bytearray(whole)
        flipped[position] ^= 1 << chosen.randrange(8)
        with pytest.raises(TransferError):
            receiver.decode(bytes(flipped), ids=IDS)


def test_a_consumer_of_another_tokenizer_is_refused(ends, monkeypatch):
    sender, receiver = ends

    def other(codec: str, tokenizer: str, *prefix):
        return request_of(codec, "another", *prefix)

    async def run():
        async with Producer([sender]) as producer:
            consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
            return await consumer.ask(IDS), producer.counts

    monkeypatch.setattr("kvfold.transfer.consumer.request_of", other)
    answer, counts = asyncio.run(run())
    assert_own(receiver, answer, "another tokenizer")
    assert (counts.encoded, counts.refused) == (0, 1)


# What is left -------------------------------------------------------------------------------------


def held() -> tuple[int, int]:
    """Tensors that are alive, and files and sockets that are open."""
    gc.collect()
    tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    return tensors, len(os.listdir(OPEN))


@pytest.mark.skipif(not OPEN.exists(), reason=f"this system has no {OPEN}")
def test_failed_questions_leave_nothing_behind(ends):
    sender, receiver = ends
    whole = b"".join(sender.pieces(IDS))
    faults = [
        saying(whole[: len(whole) // 2], lambda writer: writer.close()),
        saying(whole[: len(whole) - 1], reset),
        saying(whole[: len(whole) - 1]),
        saying(damaged(whole, len(whole) - 100)),
        saying(MAGIC + struct.pack(">HHI", 1, 0, 2**32 - 1)),
        saying(pack_refusal("because", None)),
        dripping(whole[:16], whole[16:]),
    ]

    def fail() -> None:
        for handler in faults:
            answer, consumer = asyncio.run(against(handler, receiver, answer_seconds=0.2))
            assert (answer.source, consumer.counts.own) == ("own", 1)

    fail()
    before = held()
    for _ in range(3):
        fail()
    assert held() == before


@pytest.mark.skipif(not OPEN.exists(), reason=f"this system has no {OPEN}")
def test_clients_that_misbehave_harm_no_others_and_leave_nothing(ends):
    sender, receiver = ends
    request = pack_request(request_of(sender.codec.digest, "", IDS, None), None)
    settings = ServiceSettings(request_seconds=0.5, send_seconds=5)

    async def bad(number: int, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        said = (request, request[:20], request[:-1] + b"?", b"")[number % 4]
        writer.write(said)
        await writer.drain()
        if said == request:
            reset(writer)
        else:
            assert (await reader.read()).startswith(b"KVFOLDNO")
            writer.close()

    async def run() -> tuple[list[str], int]:
        async with Producer([sender], settings) as producer:
            port = producer.port
            asking = ConsumerSettings(port=port, connect_seconds=20)
            good = [Consumer(receiver, asking).ask(tiny_ids(1, 8 + n % 4)) for n in range(32)]
            answers, _ = await asyncio.gather(
                asyncio.gather(*good), asyncio.gather(*(bad(n, port) for n in range(32)))
            )
            await until(lambda: not producer._clients and not producer._waiting)
            return [answer.source for answer in answers], producer.counts.encoded

    for _ in range(2):
        assert asyncio.run(run())[0] == ["producer"] * 32
    before = held()
    sources, encoded = asyncio.run(run())
    assert sources == ["producer"] * 32
    # Four prefixes of the good; that of the bad, unless they were gone before it was begun.
    assert encoded in (4, 5)
    assert held() == before
