"""The methods that `make_cache` knows. Each room adds its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from kvfold.budget import Budget
from kvfold.cache.cache import KVCache
from kvfold.registry import Registry


@dataclass(frozen=True, slots=True)
class Method:
    """One way to keep a cache."""

    build: Callable[[PreTrainedModel, str, Budget | None, dict[str, object]], KVCache]
    """From a model, the method's name, a budget and options to an empty cache."""
    summary: str
    """One line for help texts."""
    takes: Callable[[Budget], bool] = lambda budget: True
    """Whether it can keep to a budget on any model."""


METHODS: Registry[Method] = Registry("method")
"""Every method by its name."""
