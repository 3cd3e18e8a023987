"""Two processes: the codes of one are used by the other, and its end is no harm."""

import asyncio
import subprocess
import sys

import pytest
import torch

from kvfold.cache import prefill
from kvfold.transfer.assemble import full_cache
from kvfold.transfer.consumer import Consumer, ConsumerSettings
from tests.processes import SOURCE, environment
from tests.tiny import tiny_ids
from tests.transfer.codecs import quick_codec
from tests.transfer.pairs import continued, tiny_pair, tiny_texts


@pytest.fixture
def producer(request: pytest.FixtureRequest):
    """A producer in a process of its own, and the port it listens at."""
    command = [sys.executable, "-m", "tests.transfer.serve_tiny", *getattr(request, "param", ())]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=SOURCE.parent
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_killed_producer_is_done_without(producer):
    process, port = producer
    base, other = tiny_pair()
    codec = quick_codec(base, other, tiny_texts(4), bits=8)
    ids, follow = tiny_ids(1, 30), tiny_ids(1, 6, seed=1)
    consumer = Consumer(codec.receiver(other), ConsumerSettings(port=port))
    served = consumer.prefix(ids)
    assert (served.source, served.reason) == ("producer", None)
    process.kill()
    process.wait()
    here = codec.decode(other, codec.encode(base, ids), ids=ids)
    found, expected = (continued(other, cache, follow) for cache in (served.cache, here))
    assert torch.equal(found, expected)
    again = consumer.prefix(ids)
    assert again.source == "own"
    assert again.cache.get_seq_length() == 30
    assert consumer.counts.to_dict() | {"bytes_received": 0} == {
        "asked": 2,
        "received": 1,
        "own": 1,
        "bytes_received": 0,
    }


@pytest.mark.parametrize("producer", [("slowly",)], indirect=True)
def test_a_producer_killed_while_it_sends_is_done_without(producer):
    process, port = producer
    base, other = tiny_pair()
    codec = quick_codec(base, other, tiny_texts(4), bits=8)
    ids, follow = tiny_ids(1, 30), tiny_ids(1, 6, seed=1)
    consumer = Consumer(codec.receiver(other), ConsumerSettings(port=port))

    async def run():
        asking = asyncio.create_task(consumer.ask(ids))
        while not consumer.counts.bytes_received and not asking.done():
            await asyncio.sleep(0.01)
        process.kill()
        return await asking

    answer = asyncio.run(run())
    assert answer.source == "own"
    assert 0 < answer.bytes_received < len(codec.encode(base, ids))
    own = full_cache(other)
    prefill(other, ids, own)
    found, expected = (continued(other, cache, follow) for cache in (answer.cache, own))
    assert torch.equal(found, expected)
