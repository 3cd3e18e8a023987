"""What a cache holds, in tokens and bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

from kvfold.artifacts import format_bytes


class Details(Protocol):
    """What a method reports beyond tokens and bytes: a dataclass of plain data."""

    def __str__(self) -> str:
        """One line for a person."""
        ...


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Tokens and bytes of a cache, counted from its tensors."""

    method: str
    """Name of the method."""
    budget: str | None
    """The budget as it was given."""
    scope: str | None
    """What shares one kept set: all layers (token), the heads of a layer, or no one (head)."""
    rows: int
    """Rows of the batch."""
    tokens_seen: int
    """Logical length, padding included."""
    tokens_kept: list[int]
    """Most tokens that a row holds, one number a layer."""
    bytes_fast: int
    """All tensors on the tier that attention reads, positions and statistics included."""
    bytes_slow: int
    """All tensors on the other tier."""
    bytes_index: int
    """The part of the fast bytes that is no key or value of a token kept: positions, statistics."""
    bytes_full: int
    """Keys and values that a full cache would hold for the same tokens."""
    details: Details | None = None
    """What the method has to say beyond that; None for most."""

    @property
    def share(self) -> float:
        """Fast bytes as a share of the full cache's."""
        return self.bytes_fast / self.bytes_full if self.bytes_full else 0.0

    def to_dict(self) -> dict[str, object]:
        """The report as plain data."""
        return {**asdict(self), "share": self.share}

    def __str__(self) -> str:
        """A line for a person, and one more where the method has details."""
        kept = f"{min(self.tokens_kept)}" if self.tokens_kept else "0"
        if self.tokens_kept and max(self.tokens_kept) != min(self.tokens_kept):
            kept += f" to {max(self.tokens_kept)}"
        slow = f" fast and {format_bytes(self.bytes_slow)} slow" if self.bytes_slow else ""
        share = f"{'fast ' if slow else ''}{self.share:.0%}"
        more = "" if self.details is None else f"\n{self.details}"
        return (
            f"{self.method}: keeps {kept} of {self.tokens_seen} tokens a layer in "
            f"{format_bytes(self.bytes_fast)}{slow}, {share} of a full cache's "
            f"{format_bytes(self.bytes_full)}{more}"
        )
