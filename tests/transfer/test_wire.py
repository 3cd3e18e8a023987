"""The message: what is sent comes back, and nothing else is ever taken."""

import json
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from kvfold.errors import TransferError
from kvfold.transfer.wire import (
    MAGIC,
    SEAL,
    Frame,
    Header,
    Limits,
    MessageReader,
    MessageWriter,
    ids_digest,
    parse_header,
    read_message,
    seal,
)

HEADER = Header(
    codec="c" * 64,
    producer="p" * 64,
    consumer="q" * 64,
    tokenizer="",
    ids="1" * 64,
    lengths=(3, 2),
    layers=3,
)
KEY = b"a shared key"


def tensors(layer: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    codes = torch.randint(-128, 128, (5, 4), generator=generator, dtype=torch.int8)
    return {"key.8": codes, "value.32": torch.randn(5, layer, generator=generator)}


def message(key: bytes | None = None, order=(0, 1, 2)) -> bytes:
    writer = MessageWriter(HEADER, key)
    return writer.start + b"".join(writer.frame(layer, tensors(layer)) for layer in order)


def read(data: bytes, **options) -> list:
    return list(read_message(data, MessageReader(**options)))


WHOLE = message()


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_what_is_sent_comes_back(key: bytes | None, order):
    header, *frames = read(message(key, order), key=key)
    assert header == HEADER
    assert [frame.layer for frame in frames] == list(order)
    for frame in frames:
        assert isinstance(frame, Frame)
        expected = tensors(frame.layer)
        assert frame.tensors.keys() == expected.keys()
        assert all(torch.equal(frame.tensors[name], expected[name]) for name in expected)


def test_a_message_cut_off_anywhere_is_refused():
    for end in range(len(WHOLE)):
        with pytest.raises(TransferError, match="the message ends"):
            read(WHOLE[:end])


def test_bytes_after_a_message_are_refused():
    with pytest.raises(TransferError, match="1 bytes follow"):
        read(WHOLE + b"\0")


@pytest.mark.parametrize("key", [None, KEY])
def test_no_flipped_bit_is_taken(key: bytes | None):
    whole = message(key)
    for position in range(len(whole)):
        for bit in (0, 7):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            with pytest.raises(TransferError):
                read(bytes(damaged), key=key)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=400))
def test_made_up_bytes_are_refused(data: bytes):
    for begin in (b"", MAGIC, WHOLE[:16], WHOLE[: len(WHOLE) // 2]):
        with pytest.raises(TransferError):
            read(begin + data)


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, len(WHOLE)), other=st.integers(0, len(WHOLE)))
def test_parts_put_together_otherwise_are_refused(cut: int, other: int):
    data = WHOLE[:cut] + WHOLE[other:]
    if data != WHOLE:
        with pytest.raises(TransferError):
            read(data)


def test_no_message_without_the_shared_key_is_taken():
    sealed = message(KEY)
    with pytest.raises(TransferError, match="give the shared key"):
        read(sealed)
    with pytest.raises(TransferError, match="not sealed with the shared key"):
        read(WHOLE, key=KEY)
    with pytest.raises(TransferError, match="another key"):
        read(sealed, key=b"another")


def test_a_frame_of_another_message_is_refused():
    other = MessageWriter(replace(HEADER, ids="2" * 64))
    writer = MessageWriter(HEADER)
    with pytest.raises(TransferError, match="altered"):
        read(writer.start + other.frame(0, tensors(0)))


def test_layers_come_once_and_are_the_messages_own():
    writer = MessageWriter(HEADER)
    twice = writer.start + 2 * writer.frame(1, tensors(1))
    with pytest.raises(TransferError, match="layer 1 came twice"):
        read(twice)
    with pytest.raises(TransferError, match="layer 3"):
        read(writer.start + writer.frame(3, tensors(1)))


def test_sizes_are_refused_before_anything_is_read():
    limits = Limits(header=50, frame=100)
    begin = struct.pack(">8sHHI", MAGIC, 1, 0, 2**32 - 1)
    reader = MessageReader()
    with pytest.raises(TransferError, match="header has 4294967295 bytes"):
        reader.take(begin)
    with pytest.raises(TransferError, match="header has"):
        read(WHOLE, limits=limits)
    for length in (2**63, 2**64 - 1, 2**28 + 1):
        reader = MessageReader()
        start = MessageWriter(HEADER).start
        reader.take(start[:16])
        reader.take(start[16:])
        with pytest.raises(TransferError, match=f"layer 0 has {length} bytes"):
            reader.take(struct.pack(">IQ", 0, length))
    with pytest.raises(TransferError, match="layer 0 has"):
        read(WHOLE, limits=Limits(frame=100))


def sealed_payload(payload: bytes) -> bytes:
    """A message whose first layer is made up, under a seal that fits."""
    start = MessageWriter(HEADER).start
    prelude = struct.pack(">IQ", 0, len(payload))
    return start + prelude + payload + seal(None, start[-SEAL:], prelude, payload)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 56) + b'{"a":{"dtype":"I8","shape":[9],"data_offsets":[0,9]}}   ',
        struct.pack("<Q", 56) + b'{"a":{"dtype":"X","shape":[1],"data_offsets":[0,1]}}    1',
        save({"a": torch.zeros(4)})[:-1],
    ],
)
def test_sealed_payloads_that_hold_no_tensors_are_refused(payload: bytes):
    with pytest.raises(TransferError, match="layer 0 holds no tensors"):
        read(sealed_payload(payload))


def test_headers_that_are_none_are_refused():
    told = json.loads(MessageWriter(HEADER).start[16:-SEAL])
    bad = [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b"9" * 5000,
        *(
            json.dumps({**told, **change}).encode()
            for change in (
                {"more": 1},
                {"codec": 3},
                {"tokenizer": None},
                {"lengths": []},
                {"lengths": [0]},
                {"lengths": [True]},
                {"lengths": [1.5]},
                {"lengths": "12"},
                {"lengths": {"0": 1}},
                {"layers": 0},
                {"layers": -1},
                {"layers": True},
                {"layers": "3"},
                {"lengths": [1] * 1025},
                {"lengths": [2**20 + 1]},
                {"lengths": [2**12] + [1] * 256},
                {"lengths": [2**70]},
                {"layers": 1025},
            )
        ),
        *(json.dumps({k: v for k, v in told.items() if k != name}).encode() for name in told),
    ]
    for body in bad:
        with pytest.raises(TransferError):
            parse_header(body, Limits())
    assert parse_header(json.dumps(told).encode(), Limits()) == HEADER


def test_another_version_is_refused():
    with pytest.raises(TransferError, match="version 2, this one reads 1"):
        read(WHOLE[:8] + b"\0\2" + WHOLE[10:])
    with pytest.raises(TransferError, match="no kvfold message"):
        read(b"HTTP/1.1 400 Bad Request\r\n")


def test_the_digest_of_ids_is_of_the_tokens_of_each_row():
    ids = torch.tensor([[0, 5, 6], [7, 8, 9]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    other = ids.clone()
    other[0, 0] = 3
    assert ids_digest(ids, mask) == ids_digest(other, mask)
    assert ids_digest(ids) != ids_digest(other)
    assert ids_digest(torch.tensor([[1, 2]])) != ids_digest(torch.tensor([[1], [2]]))
    assert ids_digest(ids.int()) == ids_digest(ids)
