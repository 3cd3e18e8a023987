"""The two ends of a transfer: a producer that sends prefixes, a consumer that takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvfold.cache import KVCache
from kvfold.errors import ConfigError, TransferError
from kvfold.transfer.assemble import Assembly
from kvfold.transfer.coder import decode_layer, encode_layer, layout_of, moved
from kvfold.transfer.endpoint import Endpoint, Trace
from kvfold.transfer.pour import queries_wanted, require_pourable
from kvfold.transfer.wire import (
    Frame,
    Header,
    Limits,
    MessageReader,
    MessageWriter,
    ids_digest,
    read_message,
)

if TYPE_CHECKING:
    from kvfold.transfer.codec import Codec

_FRAME_HEADER = 4096
"""Bytes that a frame may have beyond its tensors."""


class Sender:
    """The producer's end of a codec."""

    def __init__(self, codec: Codec, endpoint: Endpoint) -> None:
        """Use `Codec.sender`, which checks the model."""
        self.codec = codec
        self.endpoint = endpoint
        self._coders = [moved(coder, endpoint.model.device) for coder in codec.coders]

    def pieces(
        self,
        ids: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        key: bytes | None = None,
        chunk_size: int | None = None,
    ) -> Iterator[bytes]:
        """Read a prefix and give the message piece by piece: the header, then each layer.

        Args:
            ids: Token ids of the prefix, `[B, T]`, left padded.
            mask: False for padding, `[B, T]`.
            key: Seals the message; see `kvfold.transfer.wire`.
            chunk_size: Most tokens a forward.

        Raises:
            ConfigError: For a row without tokens, a mask that does not fit or pads on the right,
                or more tokens than the model has positions.
        """
        require_rows(ids, mask)
        trace = self.endpoint.read(ids, mask=mask, hidden=self.codec.patched, chunk_size=chunk_size)
        yield from self.told(trace, ids, mask=mask, key=key)

    def told(
        self,
        trace: Trace,
        ids: torch.Tensor,
        *,
        mask: torch.Tensor | None = None,
        key: bytes | None = None,
    ) -> Iterator[bytes]:
        """The same of a prefix that was read already, the inputs of patched layers included."""
        lengths = tuple(row_lengths(ids, mask))
        writer = MessageWriter(self.codec.header(ids_digest(ids, mask), lengths), key)
        yield writer.start
        for layer, coder in enumerate(self._coders):
            yield writer.frame(layer, encode_layer(coder, trace, layer))


class Receiver:
    """The consumer's end of a codec."""

    def __init__(self, codec: Codec, endpoint: Endpoint) -> None:
        """Use `Codec.receiver`, which checks the model."""
        self.codec = codec
        self.endpoint = endpoint
        self.coders = [moved(coder, endpoint.model.device) for coder in codec.coders]

    def decode(
        self,
        message: bytes,
        *,
        ids: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        key: bytes | None = None,
        limits: Limits | None = None,
        into: KVCache | None = None,
    ) -> KVCache:
        """The cache of a message.

        The cache has seen the whole prefix. A prompt that goes on after it is given to `generate`
        as ever; for one that ends with it, `cache.crop(-1)` first, so that the last token's logits
        are computed.

        Args:
            message: As `Codec.encode` gives it.
            ids: The prefix that was asked for, `[B, T]`; another one's codes are refused.
            mask: False for padding in `ids`. The cache is as wide as they are; without `ids`, as
                the longest row.
            key: Shared with the producer.
            limits: What is taken at most.
            into: An empty cache of the consumer that is filled and returned, when all has come.
                For one that goes by queries, the consumer reads the last tokens: give `ids`.

        Returns:
            That cache, or a full one of the consumer.

        Raises:
            TransferError: When the message is damaged, hostile, or of another codec or prefix.
            ConfigError: When `into` cannot be filled from codes.
        """
        reader = MessageReader(key=key, limits=limits)
        arrival: Arrival | None = None
        for piece in read_message(message, reader):
            if isinstance(piece, Header):
                arrival = self.begin(piece, reader, ids=ids, mask=mask, into=into)
            else:
                assert arrival is not None
                arrival.take(piece)
        assert arrival is not None
        return arrival.finish()

    def begin(
        self,
        header: Header,
        reader: MessageReader,
        *,
        ids: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        into: KVCache | None = None,
    ) -> Arrival:
        """Check a header and get ready for its layers; no frame may then be larger than theirs.

        Raises:
            TransferError: When the message is of another codec or prefix.
            ConfigError: When `into` cannot be filled from codes.
        """
        self._check(header, ids, mask)
        arrival = Arrival(self, header, into, ids)
        reader.frame_limit = min(reader.frame_limit, arrival.frame_limit)
        return arrival

    def _check(self, header: Header, ids: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        prefix = header.ids if ids is None else ids_digest(ids, mask)
        expected = self.codec.header(prefix, header.lengths)
        for name, meaning in (
            ("producer", "another producer model"),
            ("consumer", "another consumer model"),
            ("tokenizer", "another tokenizer"),
            ("codec", "another codec"),
            ("ids", "another prefix"),
            ("layers", "another number of layers"),
        ):
            if getattr(header, name) != getattr(expected, name):
                raise TransferError(
                    f"the message is of {meaning}: use one codec on both sides and ask again"
                )
        if ids is not None and header.lengths != tuple(row_lengths(ids, mask)):
            raise TransferError("the message is of a prefix of other lengths: ask again")
        limit = self.endpoint.anatomy.max_positions
        if limit is not None and max(header.lengths) > limit:
            raise TransferError(
                f"the message has {max(header.lengths)} tokens, more than the model's {limit} "
                "positions: ask for a shorter prefix"
            )


class Arrival:
    """A cache whose layers are coming in."""

    def __init__(
        self,
        receiver: Receiver,
        header: Header,
        into: KVCache | None = None,
        ids: torch.Tensor | None = None,
    ) -> None:
        """Use `Receiver.begin`, which checks the header.

        Raises:
            ConfigError: When `into` cannot be filled from codes, or not without token ids.
        """
        self._window = 0 if into is None else queries_wanted(into)
        if into is not None:
            require_pourable(into, receiver.endpoint)
            if self._window and ids is None:
                raise ConfigError(
                    f"{into.spec.method} goes by the queries of the last {self._window} tokens, "
                    "which the model reads itself: give the token ids of the prefix"
                )
        self._ids, width = ids, None if ids is None else ids.shape[1]
        self._into, self._held = into, dict[int, dict[str, torch.Tensor]]()
        self._coders, self._endpoint = receiver.coders, receiver.endpoint
        self._count = header.tokens
        self._layouts = [layout_of(coder, header.tokens) for coder in self._coders]
        self._assembly = Assembly(receiver.endpoint, header.lengths, into, width=width)

    @property
    def frame_limit(self) -> int:
        """Bytes that no frame exceeds."""
        sizes = [
            sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in layout.values())
            for layout in self._layouts
        ]
        return max(sizes) + _FRAME_HEADER

    def take(self, frame: Frame) -> None:
        """Decode a layer into the cache.

        Raises:
            TransferError: When its tensors are not those of the codec, or not finite.
        """
        found = {name: (t.dtype, tuple(t.shape)) for name, t in frame.tensors.items()}
        if found != self._layouts[frame.layer]:
            raise TransferError(
                f"layer {frame.layer} does not hold the tensors that the codec has: ask again"
            )
        floats = (t for t in frame.tensors.values() if t.is_floating_point())
        if not all(bool(t.isfinite().all()) for t in floats):
            raise TransferError(f"layer {frame.layer} holds NaN or infinity: ask again")
        device = self._endpoint.model.device
        packed = {name: tensor.to(device) for name, tensor in frame.tensors.items()}
        if self._into is None:
            self._decode(frame.layer, packed)
        else:
            # A cache that was given stays empty until all has come: only the codes wait.
            self._held[frame.layer] = packed

    def finish(self) -> KVCache:
        """The cache; one that was given is as it was when this fails.

        Raises:
            TransferError: When a layer is missing.
        """
        if self._into is None or len(self._held) < len(self._coders):
            return self._assembly.finish()
        before = self._into.fork()
        try:
            self._fill()
            return self._assembly.finish()
        except BaseException:
            vars(self._into).update(vars(before))
            raise

    def _fill(self) -> None:
        """Decode one layer after the other, so that no more than one is whole."""
        if self._window:
            assert self._ids is not None
            self._assembly.read(
                self._ids, self._window, lambda layer: self._rows(layer, self._held.pop(layer))
            )
            return
        for layer in range(len(self._coders)):
            self._decode(layer, self._held.pop(layer))

    def _decode(self, layer: int, packed: dict[str, torch.Tensor]) -> None:
        self._assembly.put(layer, *self._rows(layer, packed))

    @torch.no_grad()
    def _rows(
        self, layer: int, packed: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return decode_layer(self._coders[layer], self._endpoint, layer, packed, self._count)


def row_lengths(ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Tokens of each row of `[B, T]` token ids."""
    return [ids.shape[1]] * len(ids) if mask is None else mask.long().sum(-1).tolist()


def require_rows(ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Refuse what is no prefix `[B, T]`, padded on the left.

    Raises:
        ConfigError: For a mask of another shape or with padding after a token, or a row without
            tokens.
    """
    if mask is not None and mask.shape != ids.shape:
        raise ConfigError(
            f"the mask {list(mask.shape)} does not fit the token ids {list(ids.shape)}: give one "
            "of the same shape"
        )
    if ids.shape[1] == 0 or (mask is not None and not bool(mask.bool().any(-1).all())):
        raise ConfigError("a row of the prefix has no tokens: give at least one")
    if mask is not None and bool((mask[:, :-1].bool() & ~mask[:, 1:].bool()).any()):
        raise ConfigError("the mask has padding after a token: pad on the left")
