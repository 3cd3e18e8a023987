"""The message that carries a prefix: a header and one frame a layer, each sealed.

    preamble   magic `KVFOLDTX`, version u16, flags u16, length of the header u32   (big endian)
    header     JSON: codec, models, tokenizer, token ids (digests), lengths, layers
    seal       32 bytes over preamble and header
    frame      layer u32, length u64, payload (safetensors), seal over the header's seal and these

A seal is SHA-256, or HMAC-SHA256 under a shared key; a frame's seal covers the header's, so that no
frame of another message fits. Nothing is used before its seal was checked. Frames may come in any
order: a layer is told by its index. `MessageReader` says how many bytes it wants next and never
asks for more than the limits; it does no reading of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields

import torch
from safetensors.torch import load, save

from kvfold.errors import TransferError

MAGIC = b"KVFOLDTX"
"""First bytes of a message."""
VERSION = 1
"""Of the format."""
SEAL = 32
"""Bytes of a seal."""

PREAMBLE = struct.Struct(">8sHHI")
"""Magic, version, flags, and the length of what follows."""

_FRAME = struct.Struct(">IQ")
_SEALED_BY_KEY = 1
_AGAIN = "ask for it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a reader takes at most, before it believes anything."""

    header: int = 2**18
    """Bytes of a header."""
    frame: int = 2**28
    """Bytes of a layer."""
    layers: int = 1024
    """Layers."""
    rows: int = 1024
    """Rows of the batch."""
    tokens: int = 2**20
    """Tokens of all rows, each padded to the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a message is about."""

    codec: str
    """Digest of the codec."""
    producer: str
    """Fingerprint of the model that read the prefix."""
    consumer: str
    """Fingerprint of the model that it is for."""
    tokenizer: str
    """Digest of the tokenizer, empty where none was named."""
    ids: str
    """Digest of the token ids; see `ids_digest`."""
    lengths: tuple[int, ...]
    """Tokens of each row."""
    layers: int
    """Frames that follow."""

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One layer."""

    layer: int
    """Its index."""
    tensors: dict[str, torch.Tensor]
    """Packed codes, by name."""


def ids_digest(ids: torch.Tensor, tokens: torch.Tensor | None = None) -> str:
    """SHA-256 of the token ids of each row, without padding.

    Args:
        ids: `[B, T]`.
        tokens: False for padding, `[B, T]`.
    """
    digest = hashlib.sha256()
    for index, row in enumerate(ids.cpu()):
        real = row if tokens is None else row[tokens[index].cpu().bool()]
        digest.update(struct.pack(">Q", len(real)))
        digest.update(real.to(torch.int64).numpy().astype("<i8").tobytes())
    return digest.hexdigest()


class MessageWriter:
    """Makes the pieces of a message, in the order they are sent."""

    def __init__(self, header: Header, key: bytes | None = None) -> None:
        """Begin a message.

        Args:
            header: What it is about.
            key: Seals it for those who share the key; without it, only damage is found.
        """
        text = json.dumps(asdict(header)).encode()
        self._key = key
        begin = PREAMBLE.pack(MAGIC, VERSION, flags_of(key), len(text)) + text
        self._seal = seal(key, begin)
        self.start = begin + self._seal
        """Preamble, header and seal."""

    def frame(self, layer: int, tensors: Mapping[str, torch.Tensor]) -> bytes:
        """One layer's frame."""
        payload = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        prelude = _FRAME.pack(layer, len(payload))
        return prelude + payload + seal(self._key, self._seal, prelude, payload)


class MessageReader:
    """Takes a message piece by piece: give it the `wanted` bytes until none are wanted.

    Example:
        >>> reader = MessageReader()  # doctest: +SKIP
        >>> while reader.wanted:  # doctest: +SKIP
        ...     piece = reader.take(stream.read(reader.wanted))
    """

    def __init__(self, *, key: bytes | None = None, limits: Limits | None = None) -> None:
        """Begin to read.

        Args:
            key: Shared with the producer; then no message without its seal is taken.
            limits: What is taken at most.
        """
        self.limits = Limits() if limits is None else limits
        self.frame_limit = self.limits.frame
        """Bytes of a frame's payload; whoever knows the header may lower it."""
        self.wanted = PREAMBLE.size
        """Bytes that `take` is to be given next; 0 at the end."""
        self._key = key
        self._preamble = self._seal = self._prelude = b""
        self._header: Header | None = None
        self._seen: set[int] = set()

    def take(self, data: bytes) -> Header | Frame | None:
        """Take the next `wanted` bytes.

        Returns:
            The header, or a layer, when it is whole and its seal was checked.

        Raises:
            TransferError: When the message is cut off, altered, too large, sealed otherwise, or
                none of ours.
        """
        if len(data) != self.wanted:
            raise TransferError(
                f"the message ends after {len(data)} of {self.wanted} bytes of a part: {_AGAIN}"
            )
        if not self._preamble:
            return self._take_preamble(data)
        if self._header is None:
            return self._take_header(data)
        return self._take_payload(data) if self._prelude else self._take_prelude(data)

    def _take_preamble(self, data: bytes) -> None:
        length = check_preamble(data, MAGIC, self._key, self.limits.header)
        self._preamble, self.wanted = data, length + SEAL

    def _take_header(self, data: bytes) -> Header:
        body, found = data[:-SEAL], data[-SEAL:]
        check_seal(found, seal(self._key, self._preamble, body))
        self._header, self._seal = parse_header(body, self.limits), found
        self.wanted = _FRAME.size
        return self._header

    def _take_prelude(self, data: bytes) -> None:
        layer, length = _FRAME.unpack(data)
        assert self._header is not None
        if layer >= self._header.layers or layer in self._seen:
            raise TransferError(f"layer {layer} came twice or is none of the message's: {_AGAIN}")
        _check_size(f"layer {layer}", length, self.frame_limit)
        self._prelude, self.wanted = data, length + SEAL

    def _take_payload(self, data: bytes) -> Frame:
        payload, found = data[:-SEAL], data[-SEAL:]
        check_seal(found, seal(self._key, self._seal, self._prelude, payload))
        layer, _ = _FRAME.unpack(self._prelude)
        assert self._header is not None
        self._seen.add(layer)
        self._prelude = b""
        self.wanted = _FRAME.size if len(self._seen) < self._header.layers else 0
        return Frame(layer, _tensors(layer, payload))


def check_preamble(data: bytes, magic: bytes, key: bytes | None, most: int) -> int:
    """Check a preamble; returns the length of what follows, without its seal.

    Raises:
        TransferError: When it is another magic, version or way of sealing, or too long.
    """
    found, version, flags, length = PREAMBLE.unpack(data)
    if found != magic:
        raise TransferError("these bytes are no kvfold message: check the address and port")
    if version != VERSION:
        raise TransferError(
            f"the message has version {version}, this one reads {VERSION}: use the same kvfold "
            "on both sides"
        )
    if flags != flags_of(key):
        raise TransferError(
            "the message is sealed with a key and none was given: give the shared key"
            if key is None
            else "the message is not sealed with the shared key: give the other side the same"
        )
    _check_size("header", length, most)
    return length


def flags_of(key: bytes | None) -> int:
    """Flags of a preamble: whether seals are made with a key."""
    return 0 if key is None else _SEALED_BY_KEY


def read_message(data: bytes, reader: MessageReader) -> Iterator[Header | Frame]:
    """The header and the layers of a whole message in memory.

    Raises:
        TransferError: As `MessageReader.take`, and when bytes follow the message.
    """
    start = 0
    while reader.wanted:
        end = start + reader.wanted
        piece = reader.take(data[start:end])
        start = end
        if piece is not None:
            yield piece
    if start != len(data):
        raise TransferError(f"{len(data) - start} bytes follow the message: {_AGAIN}")


def parse_header(body: bytes, limits: Limits) -> Header:
    """Read and check a header.

    Raises:
        TransferError: When it is not a header, or names more than the limits allow.
    """
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TransferError(f"the message's header is not JSON: {_AGAIN}") from error
    names = {field.name for field in fields(Header)}
    if not isinstance(told, dict) or told.keys() != names:
        raise TransferError(f"the message's header does not have the fields {sorted(names)}")
    texts = names - {"lengths", "layers"}
    if not all(isinstance(told[name], str) for name in texts):
        raise TransferError(f"the message's header has a digest that is no text: {_AGAIN}")
    lengths = told["lengths"]
    if not isinstance(lengths, list) or not all(_is_count(length) for length in lengths):
        raise TransferError(f"the message's header has lengths that are none: {_AGAIN}")
    if not _is_count(told["layers"]) or not lengths:
        raise TransferError(f"the message's header speaks of no rows or no layers: {_AGAIN}")
    for name, found, most in (
        ("rows", len(lengths), limits.rows),
        ("tokens", len(lengths) * max(lengths), limits.tokens),
        ("layers", told["layers"], limits.layers),
    ):
        if found > most:
            raise TransferError(f"the message has {found} {name}, more than the {most} taken")
    return Header(**{**told, "lengths": tuple(lengths)})


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _tensors(layer: int, payload: bytes) -> dict[str, torch.Tensor]:
    try:
        return load(payload)
    # A parser may fail in any way on bytes that someone made up and sealed.
    except Exception as error:
        raise TransferError(f"layer {layer} holds no tensors ({error}): {_AGAIN}") from error


def _check_size(name: str, size: int, most: int) -> None:
    if size > most:
        raise TransferError(f"the message's {name} has {size} bytes, more than the {most} taken")


def check_seal(found: bytes, expected: bytes) -> None:
    """Refuse a seal that is not the expected one.

    Raises:
        TransferError: When it is another.
    """
    if not hmac.compare_digest(found, expected):
        raise TransferError(f"the message was altered or sealed with another key: {_AGAIN}")


def seal(key: bytes | None, *parts: bytes) -> bytes:
    """SHA-256 of the parts, or their HMAC under a key."""
    digest = hashlib.sha256() if key is None else hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        digest.update(part)
    return digest.digest()
