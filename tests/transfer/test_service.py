"""Two ends on loopback: the producer's cache when it can be had, the consumer's own when not."""

from __future__ import annotations

import asyncio
import logging
import ssl
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

import kvfold
from kvfold.cache import prefill
from kvfold.errors import ConfigError
from kvfold.transfer.codec import Codec
from kvfold.transfer.coder import decode_layer
from kvfold.transfer.consumer import Answer, Consumer, ConsumerSettings
from kvfold.transfer.ends import Receiver, Sender
from kvfold.transfer.producer import Producer, ServiceSettings
from kvfold.transfer.protocol import REQUEST, Request, pack_refusal, pack_request, request_of
from kvfold.transfer.wire import MAGIC
from tests.contract import left_padded
from tests.tiny import tiny_ids
from tests.transfer.codecs import quick_codec
from tests.transfer.pairs import continued, tiny_pair, tiny_texts

IDS = tiny_ids(1, 24)
FOLLOW = tiny_ids(1, 6, seed=1)


@pytest.fixture(scope="module")
def ends() -> tuple[Sender, Receiver]:
    base, other = tiny_pair()
    codec = quick_codec(base, other, tiny_texts(4), bits=8, patches=(1,))
    return codec.sender(base), codec.receiver(other)


def logits(receiver: Receiver, cache) -> torch.Tensor:
    return continued(receiver.endpoint.model, cache, FOLLOW)


def expected(ends, ids: torch.Tensor = IDS) -> torch.Tensor:
    """What the consumer says over the producer's codes."""
    sender, receiver = ends
    return logits(receiver, receiver.decode(b"".join(sender.pieces(ids)), ids=ids))


def own(receiver: Receiver, ids: torch.Tensor = IDS) -> torch.Tensor:
    """What the consumer says over what it read itself."""
    consumer = Consumer(receiver, ConsumerSettings(port=1))
    return logits(receiver, consumer._read(ids, None))


def assert_own(receiver: Receiver, answer: Answer, reason: str) -> None:
    assert answer.source == "own"
    assert answer.reason is not None
    assert reason in answer.reason
    assert torch.equal(logits(receiver, answer.cache), own(receiver))


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def against(handler: Handler, receiver: Receiver, **options) -> tuple[Answer, Consumer]:
    """Ask a server that does what the handler does."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        key = options.pop("key", None)
        settings = ConsumerSettings(port=port, **options)
        consumer = Consumer(receiver, settings, key=key)
        return await consumer.ask(IDS), consumer


def test_codes_are_served_and_read_once(ends):
    sender, receiver = ends

    async def run():
        async with Producer([sender]) as producer:
            consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
            answers = [await consumer.ask(IDS) for _ in range(3)]
            await asyncio.sleep(0.05)
            return answers, consumer.counts.to_dict(), producer.counts.to_dict()

    answers, asked, served = asyncio.run(run())
    size = len(b"".join(sender.pieces(IDS)))
    for answer in answers:
        assert (answer.source, answer.reason, answer.bytes_received) == ("producer", None, size)
        assert torch.equal(logits(receiver, answer.cache), expected(ends))
    assert asked == {"asked": 3, "received": 3, "own": 0, "bytes_received": 3 * size}
    assert served == {
        "requests": 3,
        "served": 3,
        "encoded": 1,
        "refused": 0,
        "broken": 0,
        "bytes_sent": 3 * size,
    }


def test_stages_are_told_apart(ends, monkeypatch):
    sender, receiver = ends
    pieces = list(sender.pieces(IDS))
    decode = decode_layer

    def slowly(*arguments):
        time.sleep(0.1)
        return decode(*arguments)

    async def handler(reader, writer):
        await reader.read(10)
        await asyncio.sleep(0.3)
        writer.write(pieces[0])
        await writer.drain()
        await asyncio.sleep(0.5)
        writer.write(b"".join(pieces[1:]))
        await writer.drain()
        await reader.read()

    monkeypatch.setattr("kvfold.transfer.ends.decode_layer", slowly)
    answer, _ = asyncio.run(against(handler, receiver))
    assert answer.source == "producer"
    stages = answer.stages
    assert 0 < stages.connect < answer.seconds - 0.8
    assert stages.wait >= 0.29
    assert stages.receive >= 0.49
    assert stages.decode >= 0.1 * len(receiver.coders)
    assert stages.read == 0
    assert 0.9 * answer.seconds < sum(stages.to_dict().values()) <= answer.seconds


def test_stages_of_a_question_that_failed(ends):
    _, receiver = ends

    async def handler(reader, writer):
        await asyncio.sleep(5)

    answer, _ = asyncio.run(against(handler, receiver, answer_seconds=0.2))
    assert answer.stages.wait >= 0.19
    assert answer.stages.read > 0
    assert (answer.stages.receive, answer.stages.decode) == (0, 0)


def test_batches_of_prefixes(ends):
    sender, receiver = ends
    ids, mask = tiny_ids(3, 24, seed=4), left_padded([24, 7, 15], 24)

    async def run():
        async with Producer([sender]) as producer:
            consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
            return await consumer.ask(ids, mask=mask)

    answer = asyncio.run(run())
    assert answer.source == "producer"
    report = answer.cache.report()
    assert (report.rows, report.tokens_seen) == (3, 24)
    positions = answer.cache.own_layers[0].slots.positions
    assert [(row >= 0).sum().item() for row in positions[:, 0]] == [24, 7, 15]


@pytest.mark.parametrize("same", [True, False])
def test_sixty_four_consumers_at_once(ends, same: bool):
    sender, receiver = ends

    async def run():
        async with Producer([sender]) as producer:
            settings = ConsumerSettings(port=producer.port, connect_seconds=20)
            prefixes = [IDS if same else tiny_ids(1, 8, seed=seed) for seed in range(64)]
            consumers = [Consumer(receiver, settings) for _ in prefixes]
            asked = (c.ask(ids) for c, ids in zip(consumers, prefixes, strict=True))
            answers = await asyncio.gather(*asked)
            await asyncio.sleep(0.1)
            left = (len(producer._clients), len(producer._waiting))
            return answers, producer.counts, left

    answers, counts, left = asyncio.run(run())
    assert {answer.source for answer in answers} == {"producer"}
    assert (counts.served, counts.encoded, left) == (64, 1 if same else 64, (0, 0))
    for seed in range(0, 64, 21):
        prefix = IDS if same else tiny_ids(1, 8, seed=seed)
        assert torch.equal(logits(receiver, answers[seed].cache), expected(ends, prefix))


def test_codes_that_are_no_longer_kept_are_made_again(ends):
    sender, receiver = ends

    async def run():
        async with Producer([sender], ServiceSettings(seconds_kept=0.0)) as producer:
            consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
            answers = [await consumer.ask(IDS) for _ in range(2)]
            return answers, producer.counts.encoded

    answers, encoded = asyncio.run(run())
    assert [answer.source for answer in answers] == ["producer"] * 2
    assert encoded == 2


def test_nobody_there(ends, caplog):
    _, receiver = ends

    async def free_port() -> int:
        server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return port

    consumer = Consumer(receiver, ConsumerSettings(port=asyncio.run(free_port())))
    with caplog.at_level(logging.WARNING):
        answer = consumer.prefix(IDS)
    assert_own(receiver, answer, "")
    assert "the consumer reads the prefix itself" in caplog.text
    assert consumer.counts.to_dict() == {
        "asked": 1,
        "received": 0,
        "own": 1,
        "bytes_received": 0,
    }


def test_a_producer_that_is_late(ends):
    _, receiver = ends

    async def handler(reader, writer):
        await asyncio.sleep(5)

    answer, consumer = asyncio.run(against(handler, receiver, answer_seconds=0.2))
    assert_own(receiver, answer, "no whole answer within 0.2 s")
    assert consumer.counts.own == 1


@pytest.mark.parametrize("key", [None, b"shared"])
def test_a_producer_that_goes_away_while_it_sends(ends, key):
    sender, receiver = ends
    pieces = list(sender.pieces(IDS, key=key))
    whole = b"".join(pieces)
    ends_of_pieces = [sum(map(len, pieces[:count])) for count in range(len(pieces) + 1)]
    cuts = sorted({*ends_of_pieces[:-1], 5, 16, 17, len(whole) // 2, len(whole) - 1})

    for cut in cuts:

        async def handler(reader, writer, cut=cut):
            await reader.read(10)
            writer.write(whole[:cut])
            await writer.drain()
            writer.close()

        answer, _ = asyncio.run(against(handler, receiver, key=key))
        assert_own(receiver, answer, "connection ended" if cut else "")


def damaged(whole: bytes, position: int) -> bytes:
    return whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :]


def test_answers_that_are_no_good(ends):
    sender, receiver = ends
    whole = b"".join(sender.pieces(IDS))
    bad = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no kvfold message"),
        (damaged(whole, 300), "altered"),
        (damaged(whole, len(whole) - 100), "altered"),
        (MAGIC + struct.pack(">HHI", 1, 0, 2**32 - 1), "4294967295 bytes"),
        (b"".join(sender.pieces(tiny_ids(1, 24, seed=9))), "another prefix"),
        (b"".join(sender.pieces(IDS, key=b"k")), "give the shared key"),
        (pack_refusal("because", None), "the producer refused: because"),
        (pack_refusal("because", None)[:-1] + b"?", "altered"),
        (pack_refusal("x" * 10**6, None), "the producer refused: xxx"),
    ]
    for data, reason in bad:

        async def handler(reader, writer, data=data):
            await reader.read(10)
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.5)

        answer, _ = asyncio.run(against(handler, receiver))
        assert_own(receiver, answer, reason)


def test_a_shared_key_is_asked_of_both(ends):
    sender, receiver = ends

    async def run(served: bytes | None, asked: bytes | None) -> Answer:
        async with Producer([sender], key=served) as producer:
            settings = ConsumerSettings(port=producer.port, answer_seconds=5)
            return await Consumer(receiver, settings, key=asked).ask(IDS)

    assert asyncio.run(run(b"one", b"one")).source == "producer"
    for served, asked in ((b"one", b"two"), (b"one", None), (None, b"one")):
        assert_own(receiver, asyncio.run(run(served, asked)), "")


def test_requests_that_are_no_good_are_refused(ends):
    sender, _ = ends
    good = Request(sender.codec.digest, "", ((5, 6),))
    settings = ServiceSettings(request_seconds=0.3, request_bytes=1000, tokens=100)
    bad = [
        (b"GET / HTTP/1.1\r\n\r\n", b"no kvfold message"),
        (pack_request(replace(good, codec="x"), None), b"this codec"),
        (pack_request(replace(good, tokenizer="x"), None), b"another tokenizer"),
        (pack_request(replace(good, rows=((300,),)), None), b"beyond the producer's 257"),
        (pack_request(replace(good, rows=((5,) * 101,)), None), b"more than the 100 taken"),
        (pack_request(replace(good, rows=((5,) * 60, (5,))), None), b"more than the 100 taken"),
        (pack_request(replace(good, rows=((5,) * 999,)), None), b"more than the 1000 taken"),
        (pack_request(replace(good, rows=()), None), b"at least one each"),
        (pack_request(replace(good, rows=((),)), None), b"at least one each"),
        (pack_request(replace(good, rows=((-1,),)), None), b"at least one each"),
        (pack_request(replace(good, rows=((1.5,),)), None), b"at least one each"),
        (pack_request(replace(good, rows=((2**63,),)), None), b"beyond the producer's 257"),
        (REQUEST + struct.pack(">HHI", 1, 0, 2**32 - 1), b"4294967295 bytes"),
        (pack_request(good, None)[:-1] + b"?", b"altered"),
        (pack_request(good, None)[:40], b"within 0.3 s"),
        (pack_request(good, b"key"), b"give the shared key"),
    ]

    async def run():
        async with Producer([sender], settings) as producer:
            found = []
            for data, _ in bad:
                reader, writer = await asyncio.open_connection("127.0.0.1", producer.port)
                writer.write(data)
                found.append(await reader.read())
                writer.close()
            return found, producer.counts

    found, counts = asyncio.run(run())
    for (_, reason), answer in zip(bad, found, strict=True):
        assert answer.startswith(b"KVFOLDNO")
        assert reason in answer
    assert (counts.refused, counts.served, counts.encoded) == (len(bad), 0, 0)


def test_a_request_that_drips_in_costs_no_more_than_its_deadline(ends):
    sender, receiver = ends
    settings = ServiceSettings(request_seconds=0.3)
    data = pack_request(Request(sender.codec.digest, "", ((5, 6),)), None)

    async def drip(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = asyncio.create_task(reader.read())
        for byte in data:
            if answer.done():
                break
            writer.write(bytes([byte]))
            await asyncio.sleep(0.05)
        writer.close()
        return await answer

    async def run():
        async with Producer([sender], settings) as producer:
            consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
            dripped, answer = await asyncio.gather(drip(producer.port), consumer.ask(IDS))
            await asyncio.sleep(0.1)
            return dripped, answer, len(producer._clients)

    dripped, answer, left = asyncio.run(run())
    assert b"did not come within 0.3 s" in dripped
    assert (answer.source, left) == ("producer", 0)


def test_a_client_that_does_not_take_its_codes_is_let_go(ends):
    sender, _ = ends
    settings = ServiceSettings(send_seconds=0.3)
    long = Request(sender.codec.digest, "", ((5,) * 500,) * 200)

    async def run():
        async with Producer([sender], settings) as producer:
            port = producer.port
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(pack_request(long, None))
            for _ in range(400):
                await asyncio.sleep(0.05)
                if producer.counts.broken:
                    break
            counts, left = replace(producer.counts), len(producer._clients)
            # Its connection is closed: what has come already is all that there is to read.
            with suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 20)
            writer.transport.abort()
            return counts, left

    counts, left = asyncio.run(run())
    assert (counts.broken, counts.served, left) == (1, 0, 0)


def test_one_client_too_many_is_refused_at_once(ends):
    sender, receiver = ends
    settings = ServiceSettings(connections=1)

    async def run():
        async with Producer([sender], settings) as producer:
            _, writer = await asyncio.open_connection("127.0.0.1", producer.port)
            await asyncio.sleep(0.05)
            consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
            refused = await consumer.ask(IDS)
            writer.transport.abort()
            await asyncio.sleep(0.05)
            return refused, await consumer.ask(IDS)

    refused, served = asyncio.run(run())
    assert_own(receiver, refused, "too many clients")
    assert served.source == "producer"


def test_a_producer_that_is_closed_lets_everyone_go(ends):
    sender, receiver = ends

    async def run():
        producer = Producer([sender])
        await producer.start()
        consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
        _, idle = await asyncio.open_connection("127.0.0.1", producer.port)
        await asyncio.sleep(0.05)
        await producer.close()
        idle.transport.abort()
        return await consumer.ask(IDS), len(producer._clients)

    answer, left = asyncio.run(run())
    assert_own(receiver, answer, "")
    assert left == 0


def test_a_producer_whose_model_fails_says_so(ends, monkeypatch):
    sender, receiver = ends

    def fail(*arguments, **options):
        raise RuntimeError("out of memory")

    async def run():
        async with Producer([sender]) as producer:
            monkeypatch.setattr(sender.endpoint, "read", fail)
            consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
            failed = await consumer.ask(IDS)
            monkeypatch.undo()
            return failed, await consumer.ask(IDS)

    failed, served = asyncio.run(run())
    assert_own(receiver, failed, "failed to read the prefix (out of memory)")
    assert served.source == "producer"


def test_several_codecs_of_one_producer(ends):
    sender, receiver = ends
    plain = quick_codec(sender.endpoint.model, receiver.endpoint.model, tiny_texts(4), bits=4)
    other = (plain.sender(sender.endpoint.model), plain.receiver(receiver.endpoint.model))

    async def run():
        async with Producer([sender, other[0]]) as producer:
            settings = ConsumerSettings(port=producer.port)
            return [await Consumer(r, settings).ask(IDS) for r in (receiver, other[1])]

    for answer, pair in zip(asyncio.run(run()), (ends, other), strict=True):
        assert torch.equal(logits(receiver, answer.cache), expected(pair))


def test_serving_other_machines_needs_a_key_or_tls(ends):
    sender, _ = ends
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="key or TLS"):
            Producer([sender], ServiceSettings(host=host))
        Producer([sender], ServiceSettings(host=host), key=b"key")
    for host in ("127.0.0.1", "::1", "localhost"):
        Producer([sender], ServiceSettings(host=host))
    with pytest.raises(ConfigError, match="key is empty"):
        Producer([sender], key=b"")
    with pytest.raises(ConfigError, match="key is empty"):
        Consumer(ends[1], ConsumerSettings(port=1), key=b"")


def test_a_port_that_is_taken_is_a_clear_error(ends):
    sender, _ = ends

    async def run():
        async with Producer([sender]) as producer:
            with pytest.raises(ConfigError, match="cannot listen at"):
                await Producer([sender], ServiceSettings(port=producer.port)).start()

    asyncio.run(run())


def test_tls_both_ways(ends, tmp_path):
    sender, receiver = ends
    certificate = self_signed(tmp_path)
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(*certificate)
    trusting = ssl.create_default_context(cafile=str(certificate[0]))

    async def run(context: ssl.SSLContext | None) -> Answer:
        async with Producer([sender], tls=served) as producer:
            settings = ConsumerSettings(
                port=producer.port, server_name="localhost", answer_seconds=5
            )
            return await Consumer(receiver, settings, tls=context).ask(IDS)

    assert asyncio.run(run(trusting)).source == "producer"
    assert_own(receiver, asyncio.run(run(ssl.create_default_context())), "certificate")
    assert_own(receiver, asyncio.run(run(None)), "")


def self_signed(folder):
    import shutil
    import subprocess

    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    paths = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command += ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(command, check=True, capture_output=True)
    return paths


def test_a_codec_of_another_pair_is_never_used(ends):
    sender, receiver = ends
    twin = Codec(sender.codec.coders, sender.codec.producer, sender.codec.consumer, "words", {})

    async def run():
        async with Producer([Sender(twin, sender.endpoint)]) as producer:
            return await Consumer(receiver, ConsumerSettings(port=producer.port)).ask(IDS)

    assert_own(receiver, asyncio.run(run()), "this codec")


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what must come; the test fails when it does not."""
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


class Held:
    """Lets the producer's model read nothing until it is let go, and notes what it is given."""

    def __init__(self, sender: Sender, monkeypatch) -> None:
        self.lengths: list[int] = []
        self.gate = threading.Event()
        read = sender.endpoint.read

        def held(ids: torch.Tensor, **options):
            self.lengths.append(ids.shape[1])
            assert self.gate.wait(20)
            return read(ids, **options)

        monkeypatch.setattr(sender.endpoint, "read", held)


async def wanting(sender: Sender, port: int, ids: torch.Tensor) -> asyncio.StreamWriter:
    """A client that has sent its request."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(pack_request(request_of(sender.codec.digest, "", ids, None), None))
    await writer.drain()
    return writer


@pytest.mark.parametrize("abruptly", [True, False])
def test_nothing_is_begun_for_clients_that_have_left(ends, monkeypatch, abruptly: bool):
    sender, receiver = ends
    held = Held(sender, monkeypatch)

    async def run():
        async with Producer([sender]) as producer:
            writers = [
                await wanting(sender, producer.port, tiny_ids(1, length)) for length in range(2, 22)
            ]
            await until(lambda: len(producer._waiting) == 20 and len(held.lengths) == 1)
            for writer in writers:
                writer.transport.abort() if abruptly else writer.close()
            # The one that was begun goes on.
            await until(lambda: len(producer._waiting) == 1 and not producer._clients)
            held.gate.set()
            consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
            answer = await consumer.ask(IDS)
            again = await consumer.ask(tiny_ids(1, held.lengths[0]))
            await until(lambda: producer.counts.served == 2)
            return answer, again, producer.counts

    answer, again, counts = asyncio.run(run())
    assert (answer.source, again.source) == ("producer", "producer")
    assert held.lengths[1:] == [24]
    assert (counts.broken, counts.served, counts.encoded) == (20, 2, 2)


def test_a_prefix_is_read_as_long_as_one_client_waits(ends, monkeypatch):
    sender, receiver = ends
    held = Held(sender, monkeypatch)

    async def run():
        async with Producer([sender]) as producer:
            first = await wanting(sender, producer.port, tiny_ids(1, 3))
            await until(lambda: len(held.lengths) == 1)
            writers = [await wanting(sender, producer.port, IDS) for _ in range(3)]
            consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
            patient = asyncio.create_task(consumer.ask(IDS))
            await until(lambda: len(producer._clients) == 5)
            for writer in (first, *writers):
                writer.transport.abort()
            await until(lambda: len(producer._clients) == 1)
            held.gate.set()
            return await patient

    answer = asyncio.run(run())
    assert answer.source == "producer"
    assert held.lengths == [3, 24]


def test_one_who_asks_for_what_was_just_given_up_is_served(ends, monkeypatch):
    sender, _ = ends
    held = Held(sender, monkeypatch)
    requests = [request_of(sender.codec.digest, "", tiny_ids(1, n), None) for n in (3, 24)]

    async def run():
        async with Producer([sender]) as producer:
            keys = [producer._check(request) for request in requests]
            producer._join(keys[0], requests[0])
            given_up = producer._join(keys[1], requests[1])
            producer._leave(keys[1], given_up)
            # Before the loop has told anyone that it is cancelled.
            wanted = producer._join(keys[1], requests[1])
            held.gate.set()
            message = await wanted.task
            return message, given_up.task.cancelled(), len(producer._waiting)

    message, cancelled, left = asyncio.run(run())
    assert b"".join(message) == b"".join(sender.pieces(IDS))
    assert (cancelled, left) == (True, 0)


def test_prefixes_that_wait_are_no_more_than_allowed(ends, monkeypatch):
    sender, receiver = ends
    held = Held(sender, monkeypatch)

    async def run():
        async with Producer([sender], ServiceSettings(prefixes=2)) as producer:
            port = producer.port
            clients = [await wanting(sender, port, tiny_ids(1, length)) for length in (3, 4)]
            await until(lambda: len(producer._waiting) == 2)
            consumer = Consumer(receiver, ConsumerSettings(port=port))
            refused = await consumer.ask(IDS)
            shared = asyncio.create_task(consumer.ask(tiny_ids(1, 4)))
            await until(lambda: len(producer._clients) == len(clients) + 1)
            held.gate.set()
            return refused, await shared

    refused, shared = asyncio.run(run())
    assert_own(receiver, refused, "too many prefixes wait")
    assert shared.source == "producer"


def test_codes_of_an_idle_producer_go_in_time(ends):
    sender, receiver = ends

    async def run():
        async with Producer([sender], ServiceSettings(seconds_kept=0.3)) as producer:
            await Consumer(receiver, ConsumerSettings(port=producer.port)).ask(IDS)
            kept = producer.store.bytes
            await until(lambda: len(producer.store) == 0)
            return kept, producer.store.bytes

    kept, left = asyncio.run(run())
    assert (kept > 0, left) == (True, 0)


def test_bytes_of_each_answer_are_its_own(ends):
    sender, receiver = ends
    prefixes = [tiny_ids(1, length) for length in (8, 24, 60)]

    async def run():
        async with Producer([sender]) as producer:
            consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
            answers = await asyncio.gather(*(consumer.ask(ids) for ids in prefixes))
            return [answer.bytes_received for answer in answers], consumer.counts.bytes_received

    found, total = asyncio.run(run())
    assert found == [len(b"".join(sender.pieces(ids))) for ids in prefixes]
    assert total == sum(found)


@pytest.mark.parametrize("port", [-1, 0, 65536, 70000])
def test_a_port_that_is_none_is_refused(port: int):
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        ConsumerSettings(port=port)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (left_padded([20], 24).flip(-1), "pad on the left"),
        (left_padded([20], 23), "give one of the same shape"),
        (left_padded([20, 24], 24), "give one of the same shape"),
        (left_padded([0], 24), "no tokens"),
    ],
)
def test_masks_that_are_none_are_refused_before_anyone_is_asked(ends, mask, message: str):
    consumer = Consumer(ends[1], ConsumerSettings(port=1))
    with pytest.raises(ConfigError, match=message):
        consumer.prefix(IDS, mask=mask)
    assert consumer.counts.asked == 0


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), OverflowError("too large")])
@pytest.mark.parametrize("method", ["full", "streaming"])
def test_a_consumer_that_fails_to_decode_reads_by_itself(ends, monkeypatch, error, method: str):
    sender, receiver = ends
    model = receiver.endpoint.model
    decode = decode_layer

    def fail(coder, endpoint, layer, *rest):
        if layer == 2:
            raise error
        return decode(coder, endpoint, layer, *rest)

    async def run():
        async with Producer([sender]) as producer:
            consumer = Consumer(receiver, ConsumerSettings(port=producer.port))
            into = None if method == "full" else kvfold.make_cache(model, method, budget=12)
            return into, await consumer.ask(IDS, into=into)

    monkeypatch.setattr("kvfold.transfer.ends.decode_layer", fail)
    into, answer = asyncio.run(run())
    assert answer.source == "own"
    assert answer.reason == str(error)
    own = kvfold.make_cache(model, method, budget=None if into is None else 12)
    prefill(model, IDS, own)
    assert into is None or answer.cache is into
    assert torch.equal(logits(receiver, answer.cache), logits(receiver, own))
