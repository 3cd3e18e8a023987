"""Decode speed, measured side by side.

In each round every method has its turn, so that whatever else the machine does meets all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedModel

from kvfold.cache import KVCache
from kvfold.evaluation.generation import decode_step
from kvfold.evaluation.settings import Timing


def seconds_now(device: torch.device) -> float:
    """The clock, once a device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def decode_rates(
    model: PreTrainedModel,
    prefilled: Mapping[str, tuple[KVCache, torch.Tensor]],
    timing: Timing,
    on_step: Callable[[str, int], None],
) -> dict[str, list[float]]:
    """Measure greedy decoding after the same prompt.

    Args:
        model: An attached model.
        prefilled: By method, a cache that holds the prompt (forks of it are used) and the prompt's
            last logits `[1, V]`.
        timing: How many rounds and steps.
        on_step: Told the round's name and the steps done after each measurement.

    Returns:
        Tokens a second, by method, one number a round.
    """
    rates: dict[str, list[float]] = {name: [] for name in prefilled}
    for index in range(timing.rounds):
        for name, (cache, logits) in prefilled.items():
            rates[name].append(_rate(model, cache.fork(), logits, timing))
            on_step(f"decode speed, round {index + 1} of {timing.rounds}", timing.steps)
    return rates


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
