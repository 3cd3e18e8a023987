"""Decode speed, measured side by side, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedModel

from kvfold.bench.rounds import alternate, seconds_now
from kvfold.bench.spread import Spread
from kvfold.cache import KVCache
from kvfold.evaluation.generation import decode_step
from kvfold.evaluation.settings import Timing


def decode_rates(
    model: PreTrainedModel,
    prefilled: Mapping[str, tuple[KVCache, torch.Tensor]],
    timing: Timing,
    on_step: Callable[[str, int], None],
) -> dict[str, Spread]:
    """Measure greedy decoding after the same prompt.

    Args:
        model: An attached model.
        prefilled: By method, a cache that holds the prompt (forks of it are used) and the prompt's
            last logits `[1, V]`.
        timing: How many rounds and steps.
        on_step: Told the round's name and the steps done after each measurement.

    Returns:
        Tokens a second, by method, one sample a round.
    """

    def measure(name: str, number: int) -> float:
        cache, logits = prefilled[name]
        rate = _rate(model, cache.fork(), logits, timing)
        on_step(f"decode speed, round {number} of {timing.rounds}", timing.steps)
        return rate

    rates = alternate(prefilled, timing.rounds, measure)
    return {name: Spread(samples) for name, samples in rates.items()}


def _rate(model: PreTrainedModel, cache: KVCache, logits: torch.Tensor, timing: Timing) -> float:
    logits = _decode(model, cache, logits, timing.warm_up)
    start = seconds_now(model.device)
    _decode(model, cache, logits, timing.timed)
    return timing.timed / (seconds_now(model.device) - start)


def _decode(
    model: PreTrainedModel, cache: KVCache, logits: torch.Tensor, steps: int
) -> torch.Tensor:
    for _ in range(steps):
        logits = decode_step(model, cache, logits.argmax(dim=-1))
    return logits
