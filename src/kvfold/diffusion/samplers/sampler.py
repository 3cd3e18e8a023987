"""What a sampler is: where it looks, what it proposes there, and which places it decides.

A sampler is a frozen description; the state of one generation stands in the canvas. To add one,
write a file in this folder, decorate the class with `register_sampler("name")` and import it in the
folder's `__init__`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from kvfold.diffusion.canvas import Canvas
from kvfold.diffusion.options import Options, as_number
from kvfold.diffusion.samplers.choice import best, confident, supported
from kvfold.diffusion.samplers.noise import RowNoise
from kvfold.errors import ConfigError
from kvfold.registry import Registry

Proposal = tuple[torch.Tensor, torch.Tensor]
"""Tokens `[W]`, and how sure they are `[W]`, in float32."""


@dataclass(frozen=True)
class Sampler(Options, ABC):
    """Options that all samplers share."""

    summary: ClassVar[str]
    """One line for the command line's help."""

    steps: int | None = None
    """Steps of the schedule; as many as tokens without it. With `threshold` or `factor` there is no
    schedule."""
    max_steps: int | None = None
    """Evaluations after which everything left is decided at once; no limit without it."""
    temperature: float = 0.0
    """Of the choice of tokens; 0 takes the likeliest."""
    threshold: float | None = None
    """Decide every place as sure as this, and at least one."""
    factor: float | None = None
    """Decide as many places as the factor rule allows, and at least one."""
    stop_at_eos: bool = True
    """Whether a row is finished when everything before a token that ends a text is decided."""

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: Naming the option.
        """
        self.require_whole("steps", optional=True)
        self.require_whole("max_steps", optional=True)
        warm = 0 <= as_number(self.temperature) < math.inf
        self.require("temperature", "a number from 0 up", holds=warm)
        sure = self.threshold is None or 0 < as_number(self.threshold) <= 1
        self.require("threshold", "a probability above 0 and at most 1", holds=sure)
        large = self.factor is None or 0 < as_number(self.factor) < math.inf
        self.require("factor", "a number above 0", holds=large)
        if self.is_parallel and self.steps is not None:
            raise ConfigError("steps have no meaning with threshold or factor: give one of them")
        if self.threshold is not None and self.factor is not None:
            raise ConfigError("threshold and factor are both given: give one of them")

    @property
    def is_parallel(self) -> bool:
        """Whether confidence, and no schedule, says how many places are decided."""
        return self.threshold is not None or self.factor is not None

    @property
    def guidance(self) -> float:
        """Scale of classifier-free guidance; 0 for none."""
        return 0.0

    def check(self, length: int) -> None:
        """Refuse a length that the options cannot do.

        Raises:
            ConfigError: Saying why.
        """

    @abstractmethod
    def block(self, canvas: Canvas) -> tuple[torch.Tensor, torch.Tensor]:
        """The first column of each row's block, and the first after it, `[B]` each."""

    @abstractmethod
    def propose(self, logits: torch.Tensor, counts: list[int], noise: RowNoise) -> Proposal:
        """Choose a token for every wanted place.

        Args:
            logits: `[W, V]` in float32, minus infinity at tokens that may not be emitted; row after
                row of the canvas.
            counts: Places of each row, `sum(counts) = W`.
            noise: Of the rows.
        """

    @abstractmethod
    def scheduled(self, canvas: Canvas) -> torch.Tensor:
        """How many places the schedule decides in this step, `[B]`."""

    def aim(self, canvas: Canvas) -> None:
        """Set the canvas's block and the places wanted in this step."""
        start, end = self.block(canvas)
        canvas.in_block = torch.where(start == canvas.start, canvas.in_block + 1, 0)
        canvas.start, canvas.end = start, end
        columns = torch.arange(canvas.width, device=start.device)
        inside = (columns >= start[:, None]) & (columns < end[:, None])
        canvas.wanted = canvas.masked if self._is_last(canvas) else canvas.masked & inside

    def choose(self, confidence: torch.Tensor, canvas: Canvas, noise: RowNoise) -> torch.Tensor:
        """The places decided in this step: at least one of each row.

        Args:
            confidence: Of the generated places, `[B, G]`; minus infinity where none is wanted.
            canvas: Aimed.
            noise: Of the rows.

        Returns:
            Boolean `[B, G]`.
        """
        if self._is_last(canvas):
            return ~confidence.isneginf()
        if self.threshold is not None:
            counts = confident(confidence, self.threshold)
        elif self.factor is not None:
            counts = supported(confidence, self.factor)
        else:
            counts = self.scheduled(canvas)
        return best(self.ranked(confidence, noise), counts.clamp_min(1))

    def ranked(self, confidence: torch.Tensor, noise: RowNoise) -> torch.Tensor:
        """Scores `[B, G]` in whose order places are decided; the confidence, unless one knows."""
        return confidence

    def _is_last(self, canvas: Canvas) -> bool:
        return self.max_steps is not None and canvas.step >= self.max_steps - 1


SAMPLERS: Registry[type[Sampler]] = Registry("sampler")
"""Every sampler by its name."""


def register_sampler(name: str) -> Callable[[type[Sampler]], type[Sampler]]:
    """Decorate a sampler class to give it a name."""

    def add(sampler: type[Sampler]) -> type[Sampler]:
        return SAMPLERS.register(name, sampler)

    return add


def make_sampler(name: str, **options: object) -> Sampler:
    """A sampler by its name and options.

    Raises:
        ConfigError: There is none of that name, or it has no such option or value.
    """
    kind = SAMPLERS[name]
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(
            f"{name} has no option {unknown[0]!r}: choose from {', '.join(sorted(known))}"
        )
    return kind(**options)  # type: ignore[arg-type]
