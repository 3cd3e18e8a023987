"""What a consumer asks, and what a producer answers when it does not send codes.

    request   magic `KVFOLDRQ` and preamble as `kvfold.transfer.wire`, JSON, seal
    refusal   magic `KVFOLDNO`, the same

A request names the codec, the tokenizer and the token ids of each row, without padding. A producer
answers with a message, or with a refusal that says why; one connection, one request.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import torch

from kvfold.errors import TransferError
from kvfold.transfer.wire import (
    PREAMBLE,
    SEAL,
    VERSION,
    check_preamble,
    check_seal,
    flags_of,
    seal,
)

REQUEST = b"KVFOLDRQ"
"""First bytes of a request."""
REFUSAL = b"KVFOLDNO"
"""First bytes of a refusal."""
REFUSAL_BYTES = 4096
"""A refusal is no longer."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prefix whose codes are wanted."""

    codec: str
    """Digest of the codec."""
    tokenizer: str
    """Digest of the tokenizer, empty where none is named."""
    rows: tuple[tuple[int, ...], ...]
    """Token ids of each row."""

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids `[B, T]`, left padded with 0, and the mask of tokens `[B, T]`."""
        length = max(map(len, self.rows))
        ids = torch.zeros(len(self.rows), length, dtype=torch.long)
        mask = torch.zeros(len(self.rows), length, dtype=torch.bool)
        for index, row in enumerate(self.rows):
            ids[index, length - len(row) :] = torch.tensor(row)
            mask[index, length - len(row) :] = True
        return ids, mask


def request_of(codec: str, tokenizer: str, ids: torch.Tensor, mask: torch.Tensor | None) -> Request:
    """The request for a prefix `[B, T]`."""
    rows = ids.tolist()
    if mask is not None:
        rows = [row[row_mask.bool()].tolist() for row, row_mask in zip(ids, mask, strict=True)]
    return Request(codec, tokenizer, tuple(map(tuple, rows)))


def pack_request(request: Request, key: bytes | None) -> bytes:
    """A request as it is sent."""
    told = {"codec": request.codec, "tokenizer": request.tokenizer, "rows": request.rows}
    return _pack(REQUEST, told, key)


def pack_refusal(reason: str, key: bytes | None) -> bytes:
    """A refusal as it is sent."""
    return _pack(REFUSAL, {"reason": reason[: REFUSAL_BYTES // 16]}, key)


async def read_request(reader: asyncio.StreamReader, key: bytes | None, most: int) -> Request:
    """Read a request of at most so many bytes.

    Raises:
        TransferError: When it is none, cut off, too large or sealed otherwise.
    """
    preamble = await read_exactly(reader, PREAMBLE.size)
    told = await _read_document(reader, preamble, REQUEST, key, most)
    rows = told.get("rows")
    texts = [told.get(name) for name in ("codec", "tokenizer")]
    if told.keys() != {"codec", "tokenizer", "rows"} or not all(isinstance(t, str) for t in texts):
        raise TransferError("the request names no codec, tokenizer and rows: send all three")
    if not isinstance(rows, list) or not rows or not all(map(_is_row, rows)):
        raise TransferError("the request's rows are not lists of token ids: send at least one each")
    return Request(str(texts[0]), str(texts[1]), tuple(map(tuple, rows)))


async def read_refusal(reader: asyncio.StreamReader, preamble: bytes, key: bytes | None) -> str:
    """Read the reason of a refusal whose preamble was read.

    Raises:
        TransferError: When it is none.
    """
    told = await _read_document(reader, preamble, REFUSAL, key, REFUSAL_BYTES)
    return str(told.get("reason"))


async def read_exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    """Read so many bytes.

    Raises:
        TransferError: When the connection ends before.
    """
    try:
        return await reader.readexactly(count)
    except asyncio.IncompleteReadError as error:
        raise TransferError(
            f"the connection ended after {len(error.partial)} of {count} bytes: ask again"
        ) from error


def _is_row(row: object) -> bool:
    return isinstance(row, list) and bool(row) and all(type(t) is int and t >= 0 for t in row)


def _pack(magic: bytes, told: dict[str, object], key: bytes | None) -> bytes:
    text = json.dumps(told).encode()
    begin = PREAMBLE.pack(magic, VERSION, flags_of(key), len(text)) + text
    return begin + seal(key, begin)


async def _read_document(
    reader: asyncio.StreamReader, preamble: bytes, magic: bytes, key: bytes | None, most: int
) -> dict[str, object]:
    length = check_preamble(preamble, magic, key, most)
    data = await read_exactly(reader, length + SEAL)
    body, found = data[:-SEAL], data[-SEAL:]
    check_seal(found, seal(key, preamble, body))
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TransferError("what was sent is not JSON: use kvfold on both sides") from error
    if not isinstance(told, dict):
        raise TransferError("what was sent is not a record: use kvfold on both sides")
    return told
