"""Codes that a producer keeps: the least recently asked for go first, and none is given too late.

What has been kept for too long goes at the next `get`, `put` or `expire`, whichever comes first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

Message = tuple[bytes, ...]
"""A message in pieces."""


@dataclass(frozen=True, slots=True)
class _Kept:
    message: Message
    size: int
    until: float


class CodeStore:
    """Messages by key, within a number of bytes and of seconds."""

    def __init__(
        self, most_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start empty.

        Args:
            most_bytes: Kept at most; larger messages are not kept at all.
            seconds: That a message is kept after it was put in.
            clock: Tells the time.
        """
        self._most, self._seconds, self._clock = most_bytes, seconds, clock
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self.bytes = 0
        """Kept now."""

    def __len__(self) -> int:
        """Messages kept now."""
        return len(self._kept)

    def get(self, key: Hashable) -> Message | None:
        """The message of a key; None when it is not there, or no longer."""
        self.expire()
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found.message

    def put(self, key: Hashable, message: Message) -> None:
        """Keep a message, and let others go for it."""
        self.expire()
        self._drop(key)
        size = sum(map(len, message))
        if size > self._most:
            return
        while self.bytes + size > self._most:
            self._drop(next(iter(self._kept)))
        self._kept[key] = _Kept(message, size, self._clock() + self._seconds)
        self.bytes += size

    def expire(self) -> None:
        """Let go what has been kept for too long."""
        now = self._clock()
        for key in [key for key, kept in self._kept.items() if kept.until <= now]:
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        found = self._kept.pop(key, None)
        self.bytes -= found.size if found else 0
