"""random: a fixed random score a token. The floor that every policy has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.cache.slots import Slots
from kvfold.evict.options import whole_number
from kvfold.evict.policy import Policy, register_policy

_MULTIPLIERS = (0x9E3779B1, 0x85EBCA6B)
_BITS = 0xFFFFFFFF


@register_policy("random")
@dataclass(frozen=True, slots=True)
class Random(Policy):
    """Scores that depend on the seed, the position and the kv head alone.

    They are a hash and not drawn one after the other, so that a row of a batch keeps the same
    tokens as it would alone.
    """

    seed: int = 0
    """Another seed keeps other tokens."""

    summary = "random tokens"

    def __post_init__(self) -> None:
        """Check the options."""
        whole_number("random", "seed", self.seed)

    def score(self, slots: Slots) -> torch.Tensor:
        """Uniform in [0, 1), `[B, P, T]`."""
        positions = slots.positions.long()
        heads = torch.arange(positions.shape[1], device=positions.device).view(1, -1, 1)
        return hashed_uniform(positions * 131 + heads, self.seed)


def hashed_uniform(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """A number in [0, 1) for each integer, by two rounds of multiply and shift on 32 bits.

    Args:
        numbers: Integers of any shape.
        seed: Changes all of them.

    Returns:
        Float32 of the same shape.
    """
    mixed = (numbers + (seed + 1) * _MULTIPLIERS[0]) & _BITS
    for multiplier in _MULTIPLIERS:
        mixed = ((mixed ^ (mixed >> 16)) * multiplier) & _BITS
    mixed = mixed ^ (mixed >> 15)
    return (mixed >> 8).float() / (1 << 24)
