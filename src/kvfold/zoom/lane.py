"""The way from the host's memory to one device: page-locked staging, and a stream beside the rest.

Where the host's memory cannot be page-locked, or a device has no streams, copies are plain ones
that are waited for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

STAGE_BYTES = 4 * 2**20
"""Of each of the two buffers in which tokens are gathered before they are copied."""

_logger = logging.getLogger(__name__)


class Event(Protocol):
    """The end of a copy."""

    def synchronize(self) -> None:
        """Wait for it, on the host."""
        ...


class Transport(Protocol):
    """Page-locked memory, and copies from it to a device while that does something else."""

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New page-locked memory; a RuntimeError where there is none."""
        ...

    def locked(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host if it is page-locked, else a copy that is; errors as in `host`."""
        ...

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New memory on the device, for `copy` to write to."""
        ...

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Begin to copy from page-locked memory into a part of some room."""
        ...

    def wait(self, room: torch.Tensor, event: Event) -> None:
        """Let what the device is given from now on wait for a copy into some room."""
        ...


class SideStream:
    """A CUDA stream beside those that compute."""

    def __init__(self, device: torch.device) -> None:
        """Open it.

        Args:
            device: A CUDA device.
        """
        self._stream = torch.cuda.Stream(device)

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New page-locked memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def locked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it is page-locked, else a copy that is."""
        return tensor.pin_memory()

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New memory on the device.

        It is the stream's own: what was freed on another may still be read there when a copy is
        written over it.
        """
        with torch.cuda.stream(self._stream):
            return torch.empty(shape, dtype=dtype, device=self._stream.device)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        """Begin a copy."""
        event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event.record(self._stream)
        return event

    def wait(self, room: torch.Tensor, event: Event) -> None:
        """Let the current stream wait; it may read the room however soon that is forgotten."""
        assert isinstance(event, torch.cuda.Event), "it is of a copy of this stream"
        current = torch.cuda.current_stream(room.device)
        current.wait_event(event)
        room.record_stream(current)


def open_transport(device: torch.device) -> Transport | None:
    """A stream beside those that compute; None where a device has none."""
    return SideStream(device) if device.type == "cuda" else None


class Coming:
    """Tokens on their way to a device."""

    def __init__(
        self, tokens: torch.Tensor, transport: Transport | None = None, event: Event | None = None
    ) -> None:
        """Note what is coming.

        Args:
            tokens: On the device, `[*, 2D]`, not to be read yet where there is an event.
            transport: What copies them.
            event: The end of the last copy.
        """
        self._tokens, self._transport, self._event = tokens, transport, event

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self._tokens.nbytes

    def wait(self) -> torch.Tensor:
        """The tokens, `[*, 2D]`, once the device has them; the host does not wait."""
        if self._transport is not None and self._event is not None:
            self._transport.wait(self._tokens, self._event)
            self._event = None
        return self._tokens

    def __deepcopy__(self, memo: dict[int, object]) -> Coming:
        """The same tokens, arrived."""
        return Coming(self.wait().clone())


@dataclass(slots=True, eq=False)
class _Stage:
    """A buffer, and the last copy from it."""

    buffer: torch.Tensor
    """Bytes, page-locked."""
    copying: Event | None = None
    """None where the buffer may be written."""

    def room(self, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """`[count, width]`, once no copy reads the buffer any more."""
        if self.copying is not None:
            self.copying.synchronize()
            self.copying = None
        return self.buffer[: count * width * dtype.itemsize].view(dtype).view(count, width)


class Lane:
    """Brings tokens from the host's memory to one device, for all layers that are there."""

    def __init__(self, device: torch.device, transport: Transport | None) -> None:
        """Start without buffers.

        Args:
            device: Where tokens go to.
            transport: Copies them; without it copies are plain ones.
        """
        self._device, self._transport = device, transport
        self._stages: list[_Stage] = []
        # Copies of a cache share the lane, and may be used by several threads.
        self._alone = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Of the buffers, on the host."""
        return sum(stage.buffer.nbytes for stage in self._stages)

    def to_host(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of the device in the host's memory, page-locked if it can be; waited for."""
        room = self._locked_room(tuple(tokens.shape), tokens.dtype)
        return tokens.cpu() if room is None else room.copy_(tokens)

    def locked(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same in page-locked memory, if it can be."""
        if self._transport is not None:
            try:
                return self._transport.locked(tensor)
            except RuntimeError as error:
                self._do_without(error)
        return tensor

    def start(self, tokens: torch.Tensor, where: torch.Tensor) -> Coming:
        """Begin to bring some tokens.

        Args:
            tokens: On the host, `[T, 2D]`.
            where: Which of them, `[N]`, on the host; one at least.

        Returns:
            `[N, 2D]`, on their way.
        """
        with self._alone:
            if self._transport is not None and self._has_stages():
                return self._staged(self._transport, tokens, where)
        return Coming(tokens.index_select(0, where).to(self._device))

    def _staged(self, transport: Transport, tokens: torch.Tensor, where: torch.Tensor) -> Coming:
        width, dtype = tokens.shape[1], tokens.dtype
        room, event = transport.room((len(where), width), dtype), None
        at_once = STAGE_BYTES // (width * dtype.itemsize)
        for some, target in zip(where.split(at_once), room.split(at_once), strict=True):
            stage = self._stages[0]
            staged = stage.room(len(some), width, dtype)
            torch.index_select(tokens, 0, some, out=staged)
            event = stage.copying = transport.copy(staged, target)
            self._stages.reverse()
        return Coming(room, transport, event)

    def _has_stages(self) -> bool:
        if not self._stages:
            # They are written both under `torch.inference_mode` and outside it.
            with torch.inference_mode(mode=False):
                room = self._locked_room((2 * STAGE_BYTES,), torch.uint8)
            self._stages = [] if room is None else [_Stage(half) for half in room.chunk(2)]
        return bool(self._stages)

    def _locked_room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        if self._transport is not None:
            try:
                return self._transport.host(shape, dtype)
            except RuntimeError as error:
                self._do_without(error)
        return None

    def _do_without(self, error: RuntimeError) -> None:
        """Go on with plain memory and plain copies, and say so once."""
        self._transport = None
        _logger.warning(
            "sekv: the host's memory cannot be page-locked for %s (%s): spans are brought there "
            "by plain copies, which takes longer",
            self._device,
            str(error).partition("\n")[0],
        )


class Lanes:
    """The lane to each device, for all layers of a cache and of its copies."""

    def __init__(self, open_: Callable[[torch.device], Transport | None] = open_transport) -> None:
        """Start without any.

        Args:
            open_: Makes what copies to a device.
        """
        self._open = open_
        self._lanes: dict[torch.device, Lane] = {}

    def to(self, device: torch.device) -> Lane:
        """The lane to a device."""
        if device not in self._lanes:
            self._lanes[device] = Lane(device, self._open(device))
        return self._lanes[device]

    @property
    def nbytes(self) -> int:
        """Of the buffers of all, on the host."""
        return sum(lane.nbytes for lane in self._lanes.values())

    def __deepcopy__(self, memo: dict[int, object]) -> Lanes:
        """Itself: copies of a cache share it."""
        return self
