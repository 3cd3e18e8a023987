"""How much of a KV cache may be kept: a share, a number of tokens, or bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, get_args

from kvfold.errors import BudgetError

MINIMUM_TOKENS = 8
"""No budget keeps fewer tokens than this in a layer: less than a few sinks and a few recent tokens
cannot carry a generation."""

STEPS = 6
"""A ratio allows one token more every few tokens seen. It is rounded down to numbers of this many
leading bits, 32 of them a doubling, so that storage grows rarely and is never over the budget."""

ROUNDING = 1 + 1e-12
"""A ratio is written in decimal: 0.29 of 100 tokens is 29, though the product comes out below."""

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_HOW = "give a share in (0, 1] such as 0.25 or 25%, tokens such as 512, or bytes such as 64MiB"

Unit = Literal["ratio", "tokens", "bytes"]


@dataclass(frozen=True, slots=True)
class Budget:
    """An upper bound on what a cache keeps.

    A ratio follows the logical length as it grows; tokens and bytes are fixed. A ratio and tokens
    bound the tokens kept in each layer. Bytes bound the keys and values, with the positions and
    statistics kept beside them, over all evicting layers and rows. A ratio of a short text never
    comes to less than `MINIMUM_TOKENS`, and what it comes to is taken up in steps of 1/32 at most.
    """

    amount: float
    """The number, in the unit."""
    unit: Unit
    """What the amount counts."""

    def __post_init__(self) -> None:
        """Refuse what can never be kept."""
        if not math.isfinite(float(self.amount)) or self.amount <= 0:
            raise BudgetError(f"budget {self.amount:g} keeps nothing: {_HOW}")
        if self.unit not in get_args(Unit):
            raise BudgetError(f"unknown budget unit {self.unit!r}: {_HOW}")
        if self.unit == "ratio" and self.amount > 1:
            raise BudgetError(f"budget {self.amount:.0%} is more than the whole cache: {_HOW}")
        if self.unit == "tokens" and self.amount < MINIMUM_TOKENS:
            raise BudgetError(
                f"budget of {self.amount:g} tokens is below the minimum of {MINIMUM_TOKENS}: {_HOW}"
            )

    @classmethod
    def parse(cls, value: Budget | float | str) -> Budget:
        """Read a budget as a person writes it.

        Args:
            value: A float is a share, an int is tokens, a string is any of `0.25`, `25%`, `512`,
                `512 tokens`, `64MiB`.

        Raises:
            BudgetError: When it is none of these, or out of range.

        Example:
            >>> Budget.parse("25%").tokens(4096)
            1024
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool):
            raise BudgetError(f"budget {value} is not an amount: {_HOW}")
        if isinstance(value, float):
            return cls(value, "ratio")
        try:
            return cls(value, "tokens") if isinstance(value, int) else cls._parse_text(str(value))
        except OverflowError as error:
            raise BudgetError(f"budget {str(value)[:12]}... is too large: {_HOW}") from error

    @classmethod
    def _parse_text(cls, text: str) -> Budget:
        match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d*)?|[+-]?\.\d+)\s*([a-zA-Z]*|%)\s*", text)
        if match is None:
            raise BudgetError(f"budget {text!r} is not an amount: {_HOW}")
        number, unit = match[1], match[2].lower()
        if unit == "%":
            return cls(float(number) / 100, "ratio")
        if unit in _UNITS:
            return cls(float(number) * _UNITS[unit], "bytes")
        if unit in ("", "tokens", "token"):
            return cls(int(number), "tokens") if "." not in number else cls._part(number, unit)
        raise BudgetError(f"budget {text!r} has the unknown unit {match[2]!r}: {_HOW}")

    @classmethod
    def _part(cls, number: str, unit: str) -> Budget:
        if unit:
            raise BudgetError(f"budget {number} {unit} has a part of a token: {_HOW}")
        return cls(float(number), "ratio")

    def tokens(self, seen: int, bytes_per_token: int = 0) -> int:
        """The most tokens one row may keep in one layer.

        Args:
            seen: Logical length of the row: all the tokens it has seen.
            bytes_per_token: What one more token of every row costs over all layers; used by a
                budget in bytes alone.

        Raises:
            BudgetError: When the bytes cannot hold the minimum.
        """
        if self.unit == "ratio":
            allowed = max(math.floor(self.amount * seen * ROUNDING), MINIMUM_TOKENS)
            return allowed - allowed % (1 << max(allowed.bit_length() - STEPS, 0))
        if self.unit == "tokens":
            return int(self.amount)
        tokens = int(self.amount) // max(bytes_per_token, 1)
        if tokens < MINIMUM_TOKENS:
            needed = MINIMUM_TOKENS * bytes_per_token
            raise BudgetError(
                f"budget of {int(self.amount)} bytes holds {tokens} tokens of this model and batch,"
                f" fewer than {MINIMUM_TOKENS}: give at least {needed} bytes"
            )
        return tokens

    @property
    def is_everything(self) -> bool:
        """Whether nothing is ever evicted under this budget."""
        return self.unit == "ratio" and self.amount == 1.0

    def __str__(self) -> str:
        """The budget as `parse` reads it."""
        if self.unit == "ratio":
            return format(Decimal(repr(float(self.amount))), "f")
        return f"{int(self.amount)}{'B' if self.unit == 'bytes' else ''}"
