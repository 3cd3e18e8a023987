"""Caches side by side on the same prompts: speed, and how far the texts agree.

The caches take turns of some steps each (A B C A B C), so that a busy machine slows all of them
alike. A text agrees with that of `none` by the share of its generated places that hold the same
token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from kvfold.diffusion.caches import DiffusionCache
from kvfold.diffusion.canvas import Prompts
from kvfold.diffusion.generate import Frame, Generation, stream
from kvfold.diffusion.model import DiffusionModel
from kvfold.diffusion.parts import Stopwatch, running
from kvfold.diffusion.samplers import Sampler
from kvfold.diffusion.work import DiffusionReport
from kvfold.errors import ConfigError

REFERENCE = "none"
"""What the others are compared with."""
TURN = 32
"""Steps of a cache's turn."""


OnTurn = Callable[[str, int, int], None]
"""Told the cache whose turn it is, the round and the turn, both from 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Lap:
    """One generation, and how long it took."""

    generation: Generation
    """What was written."""
    turns: tuple[float, ...]
    """Seconds of each turn, from the prompts on."""
    first_seconds: float
    """From the prompts to the first tokens decided."""
    parts: Mapping[str, float]
    """Seconds by part of a step; what is left of the whole is in none. Empty but on a CPU."""

    @property
    def seconds(self) -> float:
        """From the prompts to the last token."""
        return sum(self.turns)


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
    turns: tuple[float, ...]
    """Seconds of each turn of `TURN` steps, in all rounds."""
    parts: Mapping[str, float]
    """Seconds by part of a step, over all rounds; empty but on a CPU."""

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

    @property
    def step_seconds(self) -> dict[str, float]:
        """Mean seconds of a step by part, the largest first, and of what is in none (`other`)."""
        steps = self.report.steps * len(self.seconds)
        rest = sum(self.seconds) - sum(self.parts.values())
        every = {**self.parts, "other": rest} if self.parts else {}
        ranked = sorted(every.items(), key=lambda item: -item[1])
        return {name: seconds / steps for name, seconds in ranked}


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
    course = _Course(model, prompts, cache, length=length, sampler=sampler, seed=seed)
    while course.advance(TURN, on_frame):
        pass
    return course.lap()


class _Course:
    """A generation by the clock, which stands still between two turns."""

    def __init__(
        self,
        model: DiffusionModel,
        prompts: Prompts,
        cache: DiffusionCache,
        *,
        length: int,
        sampler: Sampler | None,
        seed: int,
    ) -> None:
        self._device = model.device
        self._watch = Stopwatch() if model.device.type == "cpu" else None
        self._turns: list[float] = []
        self._first: float | None = None
        generator = torch.Generator().manual_seed(seed)
        start = _now(self._device)
        self._writing = stream(
            model, prompts, cache, length=length, sampler=sampler, generator=generator
        )
        self._frames = iter(self._writing)
        self._before = _now(self._device) - start

    def advance(self, steps: int, on_frame: Callable[[Frame], None] | None = None) -> bool:
        """Take so many steps, or those that are left; whether there are more."""
        start, taken = _now(self._device) - self._before, 0
        with running(self._watch):
            for frame in islice(self._frames, steps):
                taken += 1
                if self._first is None:
                    self._first = _now(self._device) - start
                if on_frame is not None:
                    on_frame(frame)
        if taken:
            self._turns.append(_now(self._device) - start)
            self._before = 0.0
        return not self._writing.done

    def lap(self) -> Lap:
        """What was written, when all steps are taken."""
        parts = {} if self._watch is None else self._watch.seconds
        first = sum(self._turns) if self._first is None else self._first
        return Lap(self._writing.result(), tuple(self._turns), first, parts)


def race(
    model: DiffusionModel,
    prompts: Prompts,
    caches: Mapping[str, DiffusionCache],
    *,
    length: int,
    sampler: Sampler | None = None,
    rounds: int = 3,
    seed: int = 0,
    on_turn: OnTurn | None = None,
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
        on_turn: Told before each turn.

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
        courses = {
            name: _Course(model, prompts, cache, length=length, sampler=sampler, seed=seed)
            for name, cache in caches.items()
        }
        _alternate(courses, number, on_turn)
        for name, course in courses.items():
            laps[name].append(course.lap())
    wanted = laps[REFERENCE][0].generation.ids
    return [_runner(model, name, found, wanted) for name, found in laps.items()]


def _alternate(courses: Mapping[str, _Course], number: int, on_turn: OnTurn | None) -> None:
    """Let all take their turns until each has taken all of its steps."""
    left, turn = dict(courses), 0
    while left:
        turn += 1
        for name, course in tuple(left.items()):
            if on_turn is not None:
                on_turn(name, number, turn)
            if not course.advance(TURN):
                del left[name]


def _runner(model: DiffusionModel, name: str, laps: Sequence[Lap], wanted: torch.Tensor) -> Runner:
    generation = laps[0].generation
    return Runner(
        name=name,
        generation=generation,
        agreement=float((generation.ids == wanted).float().mean()),
        new_tokens=count_new(model, generation),
        seconds=tuple(lap.seconds for lap in laps),
        first_seconds=tuple(lap.first_seconds for lap in laps),
        turns=tuple(seconds for lap in laps for seconds in lap.turns),
        parts={part: sum(lap.parts[part] for lap in laps) for part in laps[0].parts},
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
