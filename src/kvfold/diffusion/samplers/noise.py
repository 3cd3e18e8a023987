"""Random numbers that belong to rows, so that a row draws the same whoever is beside it."""

from __future__ import annotations

import torch

_MOST = 2**62


class RowNoise:
    """One generator a row, each seeded from the caller's, in the order of the rows."""

    def __init__(
        self, rows: int, device: torch.device, generator: torch.Generator | None = None
    ) -> None:
        """Seed the rows.

        Args:
            rows: B.
            device: Where noise is drawn.
            generator: On the CPU; seed 0 without it.
        """
        source = torch.Generator().manual_seed(0) if generator is None else generator
        seeds = [int(torch.randint(_MOST, (1,), generator=source)) for _ in range(rows)]
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        self._device = device

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone."""
        self._generators = [self._generators[row] for row in rows.tolist()]

    def uniform(self, counts: list[int], width: int) -> torch.Tensor:
        """Numbers in (0, 1) in float64: `counts[b]` lines of row b, one row after the other.

        Args:
            counts: Lines wanted of each row.
            width: Numbers in a line.

        Returns:
            `[sum(counts), width]`.
        """
        drawn = [
            torch.rand(count, width, dtype=torch.float64, device=self._device, generator=generator)
            for generator, count in zip(self._generators, counts, strict=True)
        ]
        return torch.cat(drawn).clamp_min(torch.finfo(torch.float64).tiny)

    def gumbel(self, counts: list[int], width: int) -> torch.Tensor:
        """Standard Gumbel noise in float64, laid out as `uniform` does."""
        return -(-self.uniform(counts, width).log()).log()
