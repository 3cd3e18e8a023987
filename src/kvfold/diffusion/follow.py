"""How far caches are from the model alone, step by step: along the way that the model alone takes.

Two texts that once differ go their own ways, so that equal tokens at the end say little of a cache.
Here every cache is shown the canvas that the model without one has written, in every step, and what
it predicts of the undecided places is compared; it keeps what it has computed from step to step,
as it does when it writes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvfold.diffusion.caches import DiffusionCache, NoCache
from kvfold.diffusion.canvas import Canvas, Prompts, blank_canvas
from kvfold.diffusion.generate import Writing, evaluate, seen_by
from kvfold.diffusion.model import DiffusionModel
from kvfold.diffusion.samplers import SAMPLERS, RowNoise, Sampler
from kvfold.ops.divergence import kl_divergence

_NEVER = -1e9
"""Logit of what may not be emitted: minus infinity has no divergence."""


@dataclass(frozen=True, slots=True, eq=False)
class Following:
    """What a cache made of the way."""

    name: str
    """As it was given."""
    divergences: tuple[float, ...]
    """KL of its predictions from those of no cache, in nats, by step: the mean over the undecided
    places that are predicted."""
    same: tuple[bool, ...]
    """Of every token decided, whether the cache finds the same one likeliest there."""


def follow(
    model: DiffusionModel,
    prompts: Prompts,
    caches: Mapping[str, DiffusionCache],
    *,
    length: int,
    sampler: Sampler | None = None,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> list[Following]:
    """Let the model write without a cache, and every cache predict along.

    Args:
        model: Whose text.
        prompts: Token ids.
        caches: By name.
        length: Tokens to generate after each prompt.
        sampler: The model's own without it.
        seed: Of what is drawn at random.
        on_step: Told the steps taken.

    Returns:
        One a cache, in the order given.

    Raises:
        ConfigError: Something cannot be used.
    """
    sampler = SAMPLERS[model.traits.sampler]() if sampler is None else sampler
    canvas = blank_canvas(model, prompts, length)
    sampler.check(length)
    noise = RowNoise(len(canvas.ids), model.device, torch.Generator().manual_seed(seed))
    followers = _Followers(model, sampler, canvas, caches)
    writing = Writing(model, canvas, NoCache(), sampler, noise, watch=followers.watch)
    for frame in writing:
        if on_step is not None:
            on_step(frame.step)
    return followers.found()


class _Followers:
    """Caches on a canvas that another writes."""

    def __init__(
        self,
        model: DiffusionModel,
        sampler: Sampler,
        canvas: Canvas,
        caches: Mapping[str, DiffusionCache],
    ) -> None:
        self._model, self._sampler = model, sampler
        seen = seen_by(model, sampler, canvas)
        self._states = {name: cache.start(model, seen) for name, cache in caches.items()}
        self._numbers = canvas.numbers
        self._divergences: dict[str, list[float]] = {name: [] for name in caches}
        self._same: dict[str, list[bool]] = {name: [] for name in caches}

    def watch(self, canvas: Canvas, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        """See `Watch`."""
        self._let_go(canvas)
        seen = seen_by(self._model, self._sampler, canvas)
        decided, own = chosen[canvas.wanted], logits.clamp_min(_NEVER)
        for name, state in self._states.items():
            found = evaluate(self._model, self._sampler, canvas, seen, state).clamp_min(_NEVER)
            self._divergences[name].append(float(kl_divergence(own, found).mean()))
            same = own[decided].argmax(dim=-1) == found[decided].argmax(dim=-1)
            self._same[name] += same.tolist()

    def found(self) -> list[Following]:
        """What was seen."""
        return [
            Following(name, tuple(self._divergences[name]), tuple(self._same[name]))
            for name in self._states
        ]

    def _let_go(self, canvas: Canvas) -> None:
        """Go on with the canvas's rows alone."""
        if len(canvas.numbers) == len(self._numbers):
            return
        rows = torch.isin(self._numbers, canvas.numbers).nonzero()[:, 0]
        twice = torch.cat([rows, rows + len(self._numbers)])
        for state in self._states.values():
            state.keep(twice if self._sampler.guidance else rows)
        self._numbers = canvas.numbers
