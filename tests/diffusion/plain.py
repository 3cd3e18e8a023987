"""The published sampling loops, one row at a time over the dense forward, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kvfold.diffusion import DiffusionModel, DreamSampler, LLaDASampler

Measure = Callable[[list[float]], float]

MEASURES: dict[str, Measure] = {
    "maskgit_plus": max,
    "topk_margin": lambda p: sorted(p)[-1] - sorted(p)[-2],
    "entropy": lambda p: sum(x * math.log(x) for x in p if x > 0),
}


def plain_llada(
    model: DiffusionModel, prompt: list[int], length: int, sampler: LLaDASampler
) -> list[list[int]]:
    """The generated places after every step, at temperature 0."""
    mask = model.traits.mask_id
    row, frames = prompt + [mask] * length, []
    size = sampler.block_length or length
    starts = list(range(0, length, size))
    for number, start in enumerate(starts):
        block = range(len(prompt) + start, len(prompt) + min(start + size, length))
        steps = _share(sampler.steps or length, len(starts), number)
        for quota in [_share(len(block), steps, step) for step in range(steps)]:
            left = [place for place in block if row[place] == mask]
            if not left:
                break
            probabilities = _probabilities(model, row, prompt, sampler.cfg_scale)
            sure = {place: max(probabilities[place]) for place in left}
            row = _decided(row, probabilities, _first(sure, quota, sampler))
            frames.append(row[len(prompt) :])
        while any(row[place] == mask for place in block):  # by confidence there is no schedule
            probabilities = _probabilities(model, row, prompt, sampler.cfg_scale)
            sure = {p: max(probabilities[p]) for p in block if row[p] == mask}
            row = _decided(row, probabilities, _first(sure, 1, sampler))
            frames.append(row[len(prompt) :])
    return frames


def plain_dream(
    model: DiffusionModel, prompt: list[int], length: int, sampler: DreamSampler
) -> list[list[int]]:
    """The same for Dream's loop, at temperature 0."""
    mask, steps = model.traits.mask_id, sampler.steps or length
    row, frames, step = prompt + [mask] * length, [], 0
    times = [1 + (sampler.epsilon - 1) * step / steps for step in range(steps + 1)]
    while mask in row[len(prompt) :]:
        left = [place for place in range(len(prompt), len(row)) if row[place] == mask]
        quota = len(left)
        if step < steps - 1:
            quota = int(len(left) * (1 - times[step + 1] / times[step]))
        probabilities = _probabilities(model, row, prompt, 0.0)
        measure = MEASURES[sampler.algorithm]
        sure = {place: measure(probabilities[place]) for place in left}
        row = _decided(row, probabilities, _first(sure, quota, sampler))
        frames.append(row[len(prompt) :])
        step += 1
    return frames


def _share(total: int, parts: int, number: int) -> int:
    """One part's share of a total split evenly, the first parts getting more."""
    return total // parts + (number < total % parts)


def _first(sure: dict[int, float], quota: int, sampler: LLaDASampler | DreamSampler) -> list[int]:
    """The places to decide, surest first: one at least."""
    order = sorted(sure, key=lambda place: -sure[place])
    if sampler.threshold is not None:
        quota = sum(number >= sampler.threshold for number in sure.values())
    if sampler.factor is not None:
        fits = [
            n
            for n, place in enumerate(order, start=1)
            if (n + 1) * (1 - sure[place]) < sampler.factor
        ]
        quota = max(fits, default=0)
    return order[: max(1, quota)]


def _decided(row: list[int], probabilities: list[list[float]], places: list[int]) -> list[int]:
    row = list(row)
    for place in places:
        row[place] = probabilities[place].index(max(probabilities[place]))
    return row


def _probabilities(
    model: DiffusionModel, row: list[int], prompt: list[int], scale: float
) -> list[list[float]]:
    with torch.no_grad():
        logits = model.logits(torch.tensor([row]))[0]
        if scale:
            blank = [model.traits.mask_id] * len(prompt) + row[len(prompt) :]
            without = model.logits(torch.tensor([blank]))[0]
            logits = without + (scale + 1) * (logits - without)
    logits[:, model.traits.never] = -math.inf
    return logits.softmax(-1).tolist()
