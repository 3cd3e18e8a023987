"""What the tests of slow tiers share: new spans, and what a tier gives back of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvfold.zoom.disk import DiskTier
from kvfold.zoom.tiers import Folded, RawTier, SlowTier, Wanted
from kvfold.zoom.turning import Turning

GROUPS, WIDTH = 2, 16

Lengths = Sequence[Sequence[int]]
"""Tokens of the spans of each row."""


def folded(
    lengths: Lengths, seed: int = 0, *, width: int = WIDTH, dtype: torch.dtype = torch.float32
) -> Folded:
    """New spans of random tokens."""
    most = max(map(len, lengths))
    sizes = torch.tensor([[*row, *[0] * (most - len(row))] for row in lengths])
    count = int(sizes.sum(1).max())
    draw = torch.Generator().manual_seed(seed)
    shape = (len(lengths), GROUPS, count, width)
    keys, values = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
    places = torch.arange(count).expand(len(lengths), -1)
    positions = places.masked_fill(places >= sizes.sum(1, keepdim=True), -1)
    means = torch.randn(len(lengths), GROUPS, most, width, generator=draw)
    return Folded(keys, values, positions, sizes, means)


def turning(longest: int, dims: int = WIDTH, *, interleaved: bool = False) -> Turning:
    """Angles of the usual frequencies."""
    frequencies = 10000.0 ** (-torch.arange(0, dims, 2) / dims)
    angles = torch.arange(longest)[:, None] * frequencies
    angles = angles.repeat_interleave(2, 1) if interleaved else torch.cat([angles, angles], 1)
    return Turning(angles.cos(), angles.sin(), interleaved)


class Filled:
    """A tier and a raw one that were given the same spans."""

    def __init__(self, tier: SlowTier, folds: Sequence[Folded]) -> None:
        self.tier, self.raw = tier, RawTier(tier.longest)
        starts, total = [], 0
        for new in folds:
            for each in (self.tier, self.raw):
                each.add(new)
            starts.append(new.lengths.cumsum(1) - new.lengths + total)
            total += new.keys.shape[2]
            assert len(self.tier) == len(self.raw) == total
        self.starts = torch.cat(starts, dim=1)
        self.lengths = torch.cat([new.lengths for new in folds], dim=1)

    def wanted(self, rows: Sequence[int] | None = None) -> Wanted:
        """Every span of every row (or those) and head, in another order than they stand in."""
        where = [(r, g, s) for r in range(len(self.lengths)) for g in range(GROUPS)
                 for s in range(self.lengths.shape[1])
                 if self.lengths[r, s] > 0 and (rows is None or r in rows)]  # fmt: skip
        row, head, span = torch.tensor(where[::-1]).unbind(1)
        return Wanted(
            row, row * GROUPS + head, span, self.starts[row, span], self.lengths[row, span]
        )

    def given(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What both give of all tokens, `[*, 2D]`."""
        wanted = self.wanted()
        is_token = torch.arange(self.tier.longest) < wanted.lengths[:, None]
        return self.tier.fetch(wanted)[is_token], self.raw.fetch(wanted)[is_token]

    def error(self) -> float:
        """Relative, of the tier's tokens against the raw ones."""
        actual, expected = self.given()
        assert actual.dtype == expected.dtype
        assert torch.isfinite(actual).all()
        return float((actual.float() - expected.float()).norm() / expected.float().norm())


def assert_apart(tier: RawTier | DiskTier, other: RawTier | DiskTier) -> None:
    """Of two tiers of two rows that hold the same, neither sees what the other is given."""
    before = other.keys.clone()
    tier.add(folded([[4], [4]], 9, dtype=torch.float16))
    assert len(tier) == len(other) + 4
    assert torch.equal(other.keys, before)
    other.add(folded([[5], [5]], 8, dtype=torch.float16))
    assert torch.equal(tier.keys[:, :, : before.shape[2]], before)
