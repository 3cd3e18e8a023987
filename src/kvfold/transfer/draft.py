"""A codec in the making: bases, what an error of each costs, and plans under a budget."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from kvfold.transfer.allocate import Claim, allot
from kvfold.transfer.basis import Basis
from kvfold.transfer.coder import Coder, Reuse, bits_of
from kvfold.transfer.patch import Patch
from kvfold.transfer.quantiser import Plan
from kvfold.transfer.settings import CalibrationSettings
from kvfold.transfer.streams import Place


@dataclass(slots=True, eq=False)
class Draft:
    """What is known so far."""

    layers: int
    """Of the models."""
    settings: CalibrationSettings
    """Widths and granule."""
    bases: dict[Place, Basis] = field(default_factory=dict)
    """By place."""
    weights: dict[Place, float] = field(default_factory=dict)
    """What a unit of a place's error costs; until it is measured, all errors count by their share
    of what there is."""

    def places(self, patches: Collection[int]) -> list[Place]:
        """What travels when some layers are patched."""
        found: list[Place] = []
        for layer in range(self.layers):
            names = ("hidden",) if layer in patches else ("key", "value")
            found += [(name, layer) for name in names]
        return found

    def claim(self, place: Place) -> Claim:
        """What a place asks for."""
        basis = self.bases[place]
        return Claim(basis, self.weights.get(place, 1.0 / max(basis.total, 1e-30)))

    def plans(self, bits: float, patches: Collection[int] = ()) -> dict[Place, Plan]:
        """Plans of all that travels, within bits of a token.

        Raises:
            ConfigError: When the bits do not reach for a single step.
        """
        places = self.places(patches)
        claims = [self.claim(place) for place in places]
        found = allot(claims, self.settings.widths, bits, self.settings.granule)
        return dict(zip(places, found, strict=True))

    def full_plans(self, patches: Collection[int] = ()) -> dict[Place, Plan]:
        """Every channel at the widest."""
        widest = max(self.settings.widths)
        return {place: ((widest, self.bases[place].rank),) for place in self.places(patches)}

    def coder(self, layer: int, plans: dict[Place, Plan]) -> Coder:
        """A layer's coder, with the decoders that the moments call for."""
        hidden = ("hidden", layer)
        if hidden in plans:
            return Patch(self.bases[hidden].translator(plans[hidden]), None)
        keys, values = (
            self.bases[place].translator(plans[place])
            for place in (("key", layer), ("value", layer))
        )
        return Reuse(keys, values)

    def coders(self, plans: dict[Place, Plan]) -> list[Coder]:
        """All layers' coders."""
        return [self.coder(layer, plans) for layer in range(self.layers)]

    def most_bits(self) -> int:
        """Bits of a token when nothing is left out and no layer is patched."""
        return sum(map(bits_of, self.coders(self.full_plans())))
