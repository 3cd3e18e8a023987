"""How many tokens each layer recomputes: a curve over depth (SPA-Cache, arXiv 2602.02544).

With x the depth from 0 (first layer) to 1 (last) and p that of the peak, the share is

    rho(x) = peak (first / peak) ^ ((x - p) / p)^2          before the peak
             peak (last / peak) ^ ((x - p) / (1 - p))^2     after it

so that it is `first` at the first layer, `peak` at p and `last` at the last. The paper writes it in
layer numbers, which moves the curve by half a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.diffusion.options import as_number
from kvfold.errors import ConfigError
from kvfold.registry import Registry

_HALVINGS = 60


@dataclass(frozen=True, slots=True)
class BudgetCurve:
    """Shares of tokens over the depth of a model."""

    first: float
    """Share of the first layer."""
    peak: float
    """The largest share."""
    last: float
    """Share of the last layer."""
    at: float = 0.5
    """Depth of the peak, from 0 to 1."""
    floor: float = 0.0
    """No layer's share is below this."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: A share is outside (0, 1], or the peak is not the largest.
        """
        for name in ("first", "peak", "last"):
            require_share(getattr(self, name), f"the curve's {name}")
        if not (0 <= as_number(self.at) <= 1 and 0 <= as_number(self.floor) <= 1):
            raise ConfigError(
                f"the curve's peak is at {self.at} and its floor {self.floor}: give 0 to 1 for both"
            )
        if self.peak < max(self.first, self.last):
            raise ConfigError(
                f"the curve's peak {self.peak} is below its ends {self.first} and {self.last}: "
                "make it the largest"
            )

    def shares(self, layers: int, *, mean: float | None = None) -> list[float]:
        """The share of every layer.

        Args:
            layers: L.
            mean: What they should be on average: the curve is stretched until they are.

        Raises:
            ConfigError: `mean` is outside (0, 1] or below the floor.
        """
        raw = [self._share(index / max(layers - 1, 1)) for index in range(layers)]
        if mean is None:
            return self._stretched(raw, 1.0)
        require_share(mean, "the mean share")
        if mean < self.floor:
            raise ConfigError(
                f"the mean share {mean} is below the curve's floor {self.floor}: give more"
            )
        return self._stretched(raw, self._factor(raw, mean))

    def _share(self, depth: float) -> float:
        before = depth < self.at
        distance = (depth - self.at) / (self.at if before else max(1 - self.at, 1e-12))
        return self.peak * ((self.first if before else self.last) / self.peak) ** distance**2

    def _stretched(self, raw: list[float], factor: float) -> list[float]:
        return [min(1.0, max(self.floor, share * factor)) for share in raw]

    def _factor(self, raw: list[float], mean: float) -> float:
        """By what to stretch, so that the mean is met with floor and ceiling in place."""
        low, high = 0.0, 2 / min(raw)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            reached = sum(self._stretched(raw, middle)) / len(raw) >= mean
            low, high = (low, middle) if reached else (middle, high)
        return high


def require_share(share: object, what: str) -> None:
    """Refuse anything but a number in (0, 1].

    Raises:
        ConfigError: Naming what it is.
    """
    if not 0 < as_number(share) <= 1:
        raise ConfigError(f"{what} is {share!r}: give a number above 0 and at most 1")


CURVES: Registry[BudgetCurve] = Registry("budget curve")
"""Curves by name: those of the paper's models, and the level one."""

CURVES.register("uniform", BudgetCurve(0.25, 0.25, 0.25))
CURVES.register("llada-8b", BudgetCurve(0.03, 0.25, 0.13, at=0.75, floor=2**-4))
CURVES.register("llada-1.5", BudgetCurve(0.03, 0.25, 0.13, at=0.80, floor=2**-4))
# The paper gives 0.05, 0.30 and 0.25, scaled so that the largest becomes 0.25.
CURVES.register("dream-7b", BudgetCurve(0.05 / 1.2, 0.30 / 1.2, 0.25 / 1.2, at=0.50, floor=2**-4))
