"""What a cache for masked diffusion is: a description, and its state in one generation.

A description is a frozen dataclass whose fields are the cache's options. To add one, write a file
in this folder, decorate the class with `register_cache("name")` and import it in the folder's
`__init__`; every contract test then covers it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.flow import Outputs
from kvfold.diffusion.model import DiffusionModel
from kvfold.diffusion.options import Options
from kvfold.diffusion.work import Work
from kvfold.errors import ConfigError
from kvfold.registry import Registry


class CacheState(ABC):
    """What a cache knows of the rows of one generation."""

    def __init__(self, model: DiffusionModel) -> None:
        """Start counting.

        Args:
            model: Whose layers run.
        """
        self.model = model
        self.work = Work.of_layers(model.shape.layers)

    @abstractmethod
    def step(self, canvas: Canvas) -> Outputs:
        """Evaluate the model: outputs at least at the sources of the wanted places."""

    @abstractmethod
    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone, `[B']` indices."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all tensors held from one step to the next."""


@dataclass(frozen=True)
class DiffusionCache(Options, ABC):
    """A way to save work from one step to the next."""

    summary: ClassVar[str]
    """One line for the command line's help."""

    @abstractmethod
    def start(self, model: DiffusionModel, canvas: Canvas) -> CacheState:
        """The state of a new generation.

        Raises:
            ConfigError: The options do not fit the model.
        """

    @property
    def name(self) -> str:
        """The name it is registered by."""
        return next(name for name in CACHES if CACHES[name] is type(self))

    @property
    def label(self) -> str:
        """The cache's name, before an option's."""
        return f"{self.name}: "


CACHES: Registry[type[DiffusionCache]] = Registry("cache for diffusion")
"""Every cache by its name."""


def register_cache(name: str) -> Callable[[type[DiffusionCache]], type[DiffusionCache]]:
    """Decorate a description to give it a name."""

    def add(cache: type[DiffusionCache]) -> type[DiffusionCache]:
        return CACHES.register(name, cache)

    return add


def make_cache(cache: str | DiffusionCache, **options: object) -> DiffusionCache:
    """A cache by its name and options; one that is made already is returned as it is.

    Raises:
        ConfigError: There is none of that name, or it has no such option or value.
    """
    if isinstance(cache, DiffusionCache):
        if options:
            raise ConfigError("options were given with a cache that is made: give its name instead")
        return cache
    kind = CACHES[cache]
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        allowed = ", ".join(known) or "none"
        raise ConfigError(f"{cache} has no option {unknown[0]!r}: choose from {allowed}")
    return kind(**options)  # type: ignore[arg-type]
