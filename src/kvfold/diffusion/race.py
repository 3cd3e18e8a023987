"""Caches side by side on the same prompts: speed, and how far the texts agree.

The caches take turns (A B C A B C), so that a busy machine slows all of them alike. A text agrees
with that of `none` by the share of its generated places that hold the same token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvfold.diffusion.caches import DiffusionCache
from kvfold.diffusion.canvas import Prompts
from kvfold.diffusion.generate import Frame, Generation, stream
from kvfold.diffusion.model import DiffusionModel
from kvfold.diffusion.samplers import Sampler
from kvfold.diffusion.work import DiffusionReport
from kvfold.errors import ConfigError

REFERENCE = "none"
"""What the others are compared with."""


@dataclass(frozen=True, slots=True, eq=False)
class Lap:
    """One generation, and how long it took."""

    generation: Generation
    """What was written."""
    seconds: float
    """From the prompts to the last token."""
    first_seconds: float
    """From the prompts to the first tokens decided."""


@dataclass(frozen=True, slots=True, eq=False)
class Runner:
    """What was found of one cache."""

    name: str
    """As it was given."""
    generation: Generation
    """The same in every round."""
    agreement: float
    """Share of the generated places that hold the token of `none`."""
    new_tokens: int
    """Generated, without those that end a text."""
    seconds: tuple[float, ...]
    """By round."""
    first_seconds: tuple[float, ...]
    """To the first tokens, by round."""

    @property
    def report(self) -> DiffusionReport:
        """Steps, tokens computed, bytes held."""
        return self.generation.report

    @property
    def tokens_per_second(self) -> tuple[float, ...]:
        """By round."""
        return tuple(self.new_tokens / seconds for seconds in self.seconds)

    @property
    def tokens_per_step(self) -> float:
        """New tokens an evaluation of the model."""
        return self.new_tokens / self.report.steps


def time_generation(
    model: DiffusionModel,
    prompts: Prompts,
    cache: DiffusionCache,
    *,
    length: int,
    sampler: Sampler | None = None,
    seed: int = 0,
    on_frame: Callable[[Frame], None] | None = None,
) -> Lap:
    """One generation by the clock; arguments as `generate` takes them.

    Args:
        model: Whose text.
        prompts: Token ids.
        cache: Made.
        length: Tokens to generate after each prompt.
        sampler: The model's own without it.
        seed: Of what is drawn at random.
        on_frame: Shown the canvas after each step; it counts as time.
    """
    generator = torch.Generator().manual_seed(seed)
    start = _now(model.device)
    first = None
    writing = stream(model, prompts, cache, length=length, sampler=sampler, generator=generator)
    for frame in writing:
        first = first or _now(model.device)
        if on_frame is not None:
            on_frame(frame)
    end = _now(model.device)
    return Lap(writing.result(), end - start, (first or end) - start)


def race(
    model: DiffusionModel,
    prompts: Prompts,
    caches: Mapping[str, DiffusionCache],
    *,
    length: int,
    sampler: Sampler | None = None,
    rounds: int = 3,
    seed: int = 0,
    on_lap: Callable[[str, int], None] | None = None,
) -> list[Runner]:
    """Let every cache write after the same prompts, in turns.

    Args:
        model: Whose texts.
        prompts: Of all generations.
        caches: By name; `none` must be one of them.
        length: Tokens to generate after each prompt.
        sampler: The model's own without it.
        rounds: Generations of each cache that are timed; a short one comes before them.
        seed: Of what is drawn at random, the same for all.
        on_lap: Told the cache and the round, from 1, that comes next.

    Returns:
        One runner a cache, in the order given.

    Raises:
        ConfigError: `none` is missing, there is no round, or something cannot be used.
    """
    if REFERENCE not in caches or rounds < 1:
        raise ConfigError(
            f"a race of {', '.join(caches) or 'nothing'} in {rounds} rounds: give {REFERENCE} and "
            "others, and one round or more"
        )
    laps: dict[str, list[Lap]] = {name: [] for name in caches}
    for cache in caches.values():
        next(iter(stream(model, prompts, cache, length=length, sampler=sampler)), None)
    for number in range(1, rounds + 1):
        for name, cache in caches.items():
            if on_lap is not None:
                on_lap(name, number)
            laps[name].append(
                time_generation(model, prompts, cache, length=length, sampler=sampler, seed=seed)
            )
    wanted = laps[REFERENCE][0].generation.ids
    return [_runner(model, name, found, wanted) for name, found in laps.items()]


def _runner(model: DiffusionModel, name: str, laps: list[Lap], wanted: torch.Tensor) -> Runner:
    generation = laps[0].generation
    return Runner(
        name=name,
        generation=generation,
        agreement=float((generation.ids == wanted).float().mean()),
        new_tokens=count_new(model, generation),
        seconds=tuple(lap.seconds for lap in laps),
        first_seconds=tuple(lap.first_seconds for lap in laps),
    )


def count_new(model: DiffusionModel, generation: Generation) -> int:
    """Generated tokens, without those that end a text."""
    ends = model.traits.eos_ids
    return sum(token not in ends for row in generation.tokens for token in row)


def _now(device: torch.device) -> float:
    """The clock, once a device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
