"""Arguments that can be judged without a model: refused before torch is imported, at once."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from pathlib import Path

from kvfold.budget import Budget
from kvfold.errors import ConfigError
from kvfold.registry import Registry

DTYPES = ("float32", "fp32", "bfloat16", "bf16", "float16", "fp16", "auto")
"""What `kvfold.load` reads as a dtype."""

_POLICIES = Path(__file__).parents[1] / "evict" / "policies"


def method_names() -> list[str]:
    """Names that `kvfold.make_cache` takes: each policy has a file of its name."""
    policies = [module.name for module in pkgutil.iter_modules([str(_POLICIES)])]
    return sorted([*policies, "sekv"])


def check_methods(names: Iterable[str], *, besides: Iterable[str] = ()) -> None:
    """Refuse a name that is no method's.

    Args:
        names: As given.
        besides: Other names that will do.

    Raises:
        ConfigError: With the names there are, also when none is given.
    """
    names = tuple(names)
    if not names:
        raise ConfigError(f"no method is named: choose from {', '.join(method_names())}")
    known: Registry[str] = Registry("method")
    for name in (*besides, *method_names()):
        known.register(name, name)
    for name in names:
        known[name]


def check_model(model: str, dtype: str | None) -> None:
    """Refuse an empty name, and a dtype that no model runs in.

    Raises:
        ConfigError: Saying what to give.
    """
    if not model.strip():
        raise ConfigError("the model name is empty: give 'default', a folder or a Hub name")
    if dtype is not None and dtype.lower() not in DTYPES:
        raise ConfigError(
            f"dtype {dtype!r} is not one of float32 (fp32), bfloat16 (bf16), float16 (fp16), auto"
        )


def check_budget(budget: str | None) -> None:
    """Refuse what is no budget.

    Raises:
        BudgetError: Saying how one is written.
    """
    if budget is not None:
        Budget.parse(budget)


def check_counts(**counts: int | None) -> None:
    """Refuse numbers below 1, each given by its option's name.

    Raises:
        ConfigError: Naming the option.
    """
    for name, value in counts.items():
        if value is not None and value < 1:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} {value} is below 1: give a positive number of tokens")


def check_extras(**counts: int) -> None:
    """Refuse numbers below 0, each given by its option's name.

    Raises:
        ConfigError: Naming the option.
    """
    for name, value in counts.items():
        if value < 0:
            raise ConfigError(f"--{name} {value} is below 0: give 0 to leave it out, or more")


def check_temperature(temperature: float) -> None:
    """Refuse a negative temperature, and one that is not a number.

    Raises:
        ConfigError: Saying what to give.
    """
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature {temperature:g} cannot be used: give 0 or more")
