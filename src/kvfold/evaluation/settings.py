"""What a comparison is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from kvfold.budget import Budget
from kvfold.cache import METHODS
from kvfold.errors import ConfigError

Protocol = Literal["query-aware", "query-agnostic"]
"""Whether the cache is cut after the question is read, or before."""

DEFAULT_METHODS = ("full", "distill", "sekv", "streaming", "h2o", "snapkv", "tova", "knorm")
"""What `kvfold compare` compares, as far as they can keep to the budget."""
DEFAULT_BUDGET = "0.25"
"""The budget of all methods but `full`."""
DEFAULT_NEW_TOKENS = 24
"""Most tokens of an answer."""


def default_methods(budget: str) -> tuple[str, ...]:
    """What `kvfold compare` compares at a budget: methods that can keep to it."""
    parsed = Budget.parse(budget)
    return tuple(name for name in DEFAULT_METHODS if METHODS[name].takes(parsed))


@dataclass(frozen=True, slots=True)
class Timing:
    """How decode speed is measured."""

    rounds: int = 5
    """Measurements of each method."""
    warm_up: int = 2
    """Steps before the clock starts."""
    timed: int = 8
    """Steps on the clock."""

    @property
    def steps(self) -> int:
        """Steps of one measurement."""
        return self.warm_up + self.timed


@dataclass(frozen=True, slots=True)
class Settings:
    """How methods are compared."""

    methods: tuple[str, ...] = DEFAULT_METHODS
    """Registered names; `full` is added in front when it is missing."""
    budget: str = DEFAULT_BUDGET
    """What every method but `full` may keep, as `Budget.parse` reads it."""
    protocol: Protocol = "query-aware"
    """When the cache is cut."""
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    """Most tokens of an answer."""
    chunk_size: int | None = None
    """Most tokens a forward of the prefill; all at once without it."""
    seed: int = 0
    """Of the bootstrap."""
    timing: Timing = field(default_factory=Timing)
    """How decode speed is measured."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured, before anything long starts."""
        Budget.parse(self.budget)
        if not self.methods:
            raise ConfigError("no method is named: give at least one, such as snapkv")
        for name in self.methods:
            METHODS[name]
        repeated = {name for name in self.methods if self.methods.count(name) > 1}
        if repeated:
            raise ConfigError(f"method {min(repeated)!r} is named twice: name each method once")
        for value, what in ((self.max_new_tokens, "new tokens"), (self.chunk_size, "chunk size")):
            if value is not None and value < 1:
                raise ConfigError(f"{what}: {value} is below 1: give a positive number of tokens")

    @property
    def all_methods(self) -> tuple[str, ...]:
        """The methods with `full`, in the order in which they are measured."""
        return self.methods if "full" in self.methods else ("full", *self.methods)

    def to_dict(self) -> dict[str, object]:
        """The settings as plain data."""
        return asdict(self)
