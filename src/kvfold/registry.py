"""Names by which methods, policies and tasks are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from kvfold.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named choices that explains itself when a name is unknown."""

    def __init__(self, kind: str) -> None:
        """Start empty.

        Args:
            kind: What the names stand for, as an error message says it ("method").
        """
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, entry: T) -> T:
        """Add an entry and return it.

        Raises:
            ConfigError: When the name is taken.
        """
        if name in self._entries:
            raise ConfigError(f"the {self.kind} {name!r} is registered twice: choose another name")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        """The entry of that name.

        Raises:
            ConfigError: When there is none; the message lists the names there are.
        """
        if name not in self._entries:
            choices = ", ".join(self._entries)
            raise ConfigError(f"unknown {self.kind} {name!r}: choose one of {choices}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        """The names, in order of registration."""
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        """Whether that name is registered."""
        return name in self._entries
