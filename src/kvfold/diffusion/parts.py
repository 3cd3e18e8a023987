"""Where the time of a generation goes: seconds by part of a step, each without those inside it.

A part costs nothing to speak of where nobody measures. On an accelerator, whose work goes on after
a call has returned, parts cannot be told apart by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Stopwatch:
    """Seconds by part."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.seconds: dict[str, float] = {}
        self._inside: list[float] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is done in the context belongs to a part, but for the parts within."""
        start = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - start
            alone = whole - self._inside.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + alone
            if self._inside:
                self._inside[-1] += whole


_RUNNING: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


@contextmanager
def running(watch: Stopwatch | None) -> Iterator[None]:
    """Parts within the context count for this one."""
    token = _RUNNING.set(watch)
    try:
        yield
    finally:
        _RUNNING.reset(token)


@contextmanager
def part(name: str) -> Iterator[None]:
    """A part of a step, if anyone measures."""
    watch = _RUNNING.get()
    if watch is None:
        yield
        return
    with watch.part(name):
        yield
