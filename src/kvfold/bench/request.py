"""What goes to a measuring process and what comes back, both as one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

Task = Literal["store", "decode", "prefill"]
"""Prefill a cache into a file, time decode steps from one, or time a prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One task for one process."""

    task: Task
    """What to do."""
    model: str
    """A name or folder."""
    dtype: str
    """Of weights and cache."""
    device: str
    """Where the model runs."""
    threads: int
    """Of torch."""
    subject: str
    """`dynamic` or a method."""
    budget: str | None = None
    """None for what keeps everything."""
    context: int
    """Tokens to prefill, or that are in the file."""
    read: int | None = None
    """Those of them that are read; the rest repeats their states. All without it."""
    batch: int = 1
    """Rows that the file's one row is repeated to."""
    warmup: int = 0
    """Untimed decode steps."""
    steps: int = 0
    """Timed decode steps."""
    chunk_size: int | None = None
    """Most tokens a forward in prefill."""
    file: str | None = None
    """The stored cache."""

    def to_json(self) -> str:
        """The request as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Request:
        """Read what `to_json` wrote."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one process measured."""

    seconds: list[float]
    """One number a decode step, or the time to the first token alone."""
    tokens: int
    """Tokens processed in all these seconds, over all rows."""
    attention: str
    """The attention implementation that ran."""
    model_bytes: int
    """Of the weights."""
    rss_model: int | None
    """Resident bytes of the process with the model loaded and used once."""
    rss_peak: int | None
    """Most resident bytes of the process, ever."""
    device_peak: int | None
    """Most bytes allocated on a CUDA device; None elsewhere."""
    tokens_seen: int
    """Logical length of the cache at the end, of each row."""
    tokens_kept: list[int]
    """Most tokens that a row holds at the end, one number a layer."""
    cache_bytes: int
    """All tensors of the cache at the end."""
    full_bytes: int
    """Keys and values that a full cache would hold."""
    slow_bytes: int = 0
    """The part of the cache's bytes that is on the slow tier."""
    moved_bytes: int = 0
    """Brought from there to the fast tier in all steps, the first ones included."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds that the method itself took of all, by part, where it counts them."""

    @property
    def tokens_per_second(self) -> float:
        """Throughput over all the seconds."""
        return self.tokens / sum(self.seconds)

    def to_json(self) -> str:
        """The measurement as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Measurement:
        """Read what `to_json` wrote."""
        return cls(**json.loads(line))
