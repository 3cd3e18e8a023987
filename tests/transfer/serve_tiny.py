"""A process that serves the codes of a tiny pair, for tests that kill it."""

from __future__ import annotations

import asyncio
import sys

from kvfold.transfer.producer import Producer
from kvfold.transfer.store import Message
from tests.transfer.codecs import quick_codec
from tests.transfer.pairs import tiny_pair, tiny_texts


class SlowProducer(Producer):
    """Sends a piece a second, so that it can be killed in between."""

    async def _send(self, writer: asyncio.StreamWriter, message: Message) -> None:
        for piece in message:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(1)


async def serve() -> None:
    base, other = tiny_pair()
    codec = quick_codec(base, other, tiny_texts(4), bits=8)
    kind = SlowProducer if sys.argv[1:] == ["slowly"] else Producer
    async with kind([codec.sender(base)]) as producer:
        sys.stdout.write(f"{producer.port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
