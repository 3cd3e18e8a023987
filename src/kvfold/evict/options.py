"""Checks that policies make of their options."""

from __future__ import annotations

from kvfold.errors import ConfigError


def positive(method: str, name: str, value: int) -> None:
    """Refuse anything but a positive whole number.

    Raises:
        ConfigError: Naming the method and the option.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{method}: {name} is {value!r}, give a whole number of at least 1")
