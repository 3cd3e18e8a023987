"""Checks of a method's options."""

from __future__ import annotations

from kvfold.errors import ConfigError

_MOST = 2**31 - 1


def whole_number(method: str, name: str, value: object, *, least: int = 0) -> int:
    """Refuse anything but a whole number from `least` up.

    Raises:
        ConfigError: Naming the method and the option.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise ConfigError(f"{method}: {name} is {value!r}, give a whole number of at least {least}")
    return value
