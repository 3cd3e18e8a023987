"""What the caches of a whole evaluation have held."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvfold.cache import CacheReport


@dataclass(slots=True)
class Holdings:
    """Bytes summed over caches, each as it stood at its end."""

    caches: int = 0
    """How many."""
    bytes_fast: int = 0
    """On the tier that attention reads."""
    bytes_slow: int = 0
    """On the other."""
    bytes_full: int = 0
    """That a full cache would hold."""

    def add(self, report: CacheReport) -> None:
        """Count one cache more."""
        self.caches += 1
        self.bytes_fast += report.bytes_fast
        self.bytes_slow += report.bytes_slow
        self.bytes_full += report.bytes_full

    def to_dict(self) -> dict[str, int]:
        """The sums by name."""
        return asdict(self)
