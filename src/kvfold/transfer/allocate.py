"""Bits where they count: widths of every channel of every coder under one budget.

Each channel climbs a ladder of widths, `0 -> 4 -> 8` say. A step of the ladder takes some error
off and costs some bits; the step that takes most off for a bit is taken first, until none fits.
With errors that add up over channels and coders this is the best that whole steps can do, but for
the last one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvfold.errors import ConfigError
from kvfold.transfer.basis import Basis
from kvfold.transfer.quantiser import Plan


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A coder that asks for bits."""

    basis: Basis
    """Its code."""
    weight: float
    """What a unit of its error costs."""


def allot(claims: Sequence[Claim], widths: Sequence[int], bits: float, granule: int) -> list[Plan]:
    """Share bits out.

    Args:
        claims: The coders.
        widths: Bits that a channel may take; 0 is always possible.
        bits: Most bits of a token, over all coders.
        granule: Channels that climb together; even, so that two 4-bit codes fill a byte.

    Returns:
        A plan for each coder, within the bits.

    Raises:
        ConfigError: When the bits do not reach for a single step.
    """
    ladder = sorted(widths)
    climbs = [_Climb(claim, ladder, granule) for claim in claims]
    heap = [step for index, climb in enumerate(climbs) for step in climb.steps(index)]
    heapq.heapify(heap)
    left = bits
    while heap:
        worth, index, rung, count = heapq.heappop(heap)
        climb = climbs[index]
        # An offer made before others of its coder were taken may be of other channels now.
        if (worth, count) != climb.offer(rung):
            continue
        cost = climb.cost(rung, count)
        if cost <= left:
            left -= cost
            climb.counts[rung] += count
            for step in climb.steps(index):
                heapq.heappush(heap, step)
    if claims and not any(any(climb.counts) for climb in climbs):
        raise ConfigError(
            f"{bits:.0f} bits a token are not enough for one channel of any layer: give a larger "
            "payload"
        )
    return [climb.plan() for climb in climbs]


class _Climb:
    """How far one coder's channels have come; the first channels stand highest."""

    def __init__(self, claim: Claim, ladder: Sequence[int], granule: int) -> None:
        self.counts = [0] * len(ladder)
        """Channels that reached each rung."""
        self._ladder, self._granule = ladder, granule
        self._rank, self._heads = claim.basis.rank, claim.basis.heads
        self._below = [0, *ladder]
        gains = claim.weight * claim.basis.gains.double().cpu()
        lost = [torch.ones_like(gains)]
        lost += [claim.basis.losses[bits].double().cpu() for bits in ladder]
        # Error taken off by the first i channels' step onto each rung.
        self._sums = [
            [0.0, *(gains * (before - after)).cumsum(0).tolist()]
            for before, after in itertools.pairwise(lost)
        ]

    def steps(self, index: int) -> list[tuple[float, int, int, int]]:
        """What can be done now, as (worth, index, rung, channels), best worth lowest."""
        found = []
        for rung in range(len(self._ladder)):
            worth, count = self.offer(rung)
            if count and worth < 0:
                found.append((worth, index, rung, count))
        return found

    def offer(self, rung: int) -> tuple[float, int]:
        """Error for each bit, negative, and channels of the next step onto a rung."""
        start = self.counts[rung]
        below = self.counts[rung - 1] if rung else self._rank
        count = min(self._granule, below - start)
        if count == 0:
            return 0.0, 0
        gain = self._sums[rung][start + count] - self._sums[rung][start]
        return -gain / self.cost(rung, count), count

    def cost(self, rung: int, count: int) -> int:
        """Bits of a step onto a rung."""
        # Two 4-bit codes share a byte, so that an odd number of them is charged as one more.
        whole = count + count % 2 if self._ladder[0] == 4 else count
        return self._heads * whole * (self._ladder[rung] - self._below[rung])

    def plan(self) -> Plan:
        """(bits, channels), wide first, of the channels that stand on each rung."""
        above = [*self.counts[1:], 0]
        standing = zip(self._ladder, self.counts, above, strict=True)
        return tuple((bits, count - more) for bits, count, more in standing if count > more)[::-1]
