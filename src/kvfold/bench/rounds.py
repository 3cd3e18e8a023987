"""Measuring in rounds: whose turn it is, and the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

Found = TypeVar("Found")


def alternate(
    subjects: Iterable[str], rounds: int, measure: Callable[[str, int], Found]
) -> dict[str, tuple[Found, ...]]:
    """Measure the subjects in turns, A B C A B C, so that slow drift hits all alike.

    Args:
        subjects: Names.
        rounds: Measurements of each.
        measure: From a subject and the number of the round, from 1.

    Returns:
        By subject, one measurement a round.
    """
    found: dict[str, list[Found]] = {subject: [] for subject in subjects}
    for number in range(1, rounds + 1):
        for subject, measurements in found.items():
            measurements.append(measure(subject, number))
    return {subject: tuple(measurements) for subject, measurements in found.items()}


def seconds_now(device: torch.device) -> float:
    """The clock, once a device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()
