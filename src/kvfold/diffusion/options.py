"""Checks of the options of samplers and caches."""

from __future__ import annotations

import math

from kvfold.errors import ConfigError


def as_number(value: object) -> float:
    """The number, or NaN, which no comparison holds for, of what is none."""
    number = isinstance(value, float | int) and not isinstance(value, bool)
    return float(value) if number else math.nan  # type: ignore[arg-type]


def is_whole(value: object, least: int = 1) -> bool:
    """Whether it is a whole number from `least` up."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class Options:
    """What frozen dataclasses of options share: refusals that name the option."""

    @property
    def label(self) -> str:
        """What stands before the option's name in a message."""
        return ""

    def require(self, option: str, expected: str, *, holds: bool) -> None:
        """Refuse an option's value.

        Args:
            option: Its name.
            expected: What to give instead.
            holds: Whether the value can be used.

        Raises:
            ConfigError: When it cannot.
        """
        if not holds:
            given = getattr(self, option)
            raise ConfigError(f"{self.label}{option} is {given!r}: give {expected}")

    def require_whole(self, option: str, *, least: int = 1, optional: bool = False) -> None:
        """Refuse anything but a whole number from `least` up, or None where it is optional.

        Raises:
            ConfigError: Naming the option.
        """
        value = getattr(self, option)
        holds = is_whole(value, least) or (optional and value is None)
        self.require(option, f"a whole number of at least {least}", holds=holds)

    def require_choice(self, option: str, choices: tuple[str, ...]) -> None:
        """Refuse anything but one of some words.

        Raises:
            ConfigError: Naming the option and the words.
        """
        self.require(option, " or ".join(choices), holds=getattr(self, option) in choices)
