"""Choices by measurement: what errors cost, which layers to patch, how large a payload.

- The weight of a place is the divergence when it alone is coded, for each unit of its error.
- A layer's sensitivity is what the divergence loses when it alone is restored (restore-one).
- Patches are added one after the other, each with those before it in place, at an equal payload:
  every candidate is given its own allotment of the same bits, so that a patch must earn what its
  wider code takes from the others. (The paper compares with oracle states, and charges by k.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvfold.errors import ConfigError
from kvfold.transfer.allocate import allot
from kvfold.transfer.coder import Coder, bits_of
from kvfold.transfer.draft import Draft
from kvfold.transfer.probes import Probes, States
from kvfold.transfer.streams import Place, Tell

_FLOOR = 1e-9
"""Divergence below which a measurement is noise."""
_HALVINGS = 10
"""Steps of the search for a payload."""


def measure(draft: Draft, probes: Probes, bits: float, patches: Collection[int]) -> float:
    """Divergence of the draft's codec within bits of a token."""
    return probes.divergence(probes.all_decoded(draft.coders(draft.plans(bits, patches))))


def measure_weights(draft: Draft, probes: Probes, bits: float, tell: Tell) -> dict[Place, float]:
    """What a unit of the error of each key and value code costs, in nats.

    Args:
        draft: With bases of keys and values.
        probes: To measure on.
        bits: Of a token, at which errors are made.
        tell: Told after each.
    """
    plans = draft.plans(bits)
    places = list(plans)
    found = {}
    for index, place in enumerate(places):
        name, layer = place
        keys, values = probes.decoded(layer, draft.coder(layer, plans))
        own = probes.own[layer]
        states: States = (keys, own[1]) if name == "key" else (own[0], values)
        cost = probes.divergence({layer: states})
        found[place] = _weight(cost, draft.bases[place].error(plans[place]))
        tell(index + 1, len(places))
    return found


def measure_patch_weights(
    draft: Draft, probes: Probes, bits: float, pool: Sequence[int]
) -> dict[Place, float]:
    """The same for codes of the attention's input, each as large as what it would replace.

    A layer of which that is too small for a single step is left out: it cannot be patched.
    """
    plans, found = draft.plans(bits), {}
    for layer in pool:
        place: Place = ("hidden", layer)
        room = max(bits_of(draft.coder(layer, plans)), bits / draft.layers)
        settings = draft.settings
        try:
            plan = allot([draft.claim(place)], settings.widths, room, settings.granule)[0]
        except ConfigError:
            continue
        cost = probes.divergence({layer: probes.decoded(layer, draft.coder(layer, {place: plan}))})
        found[place] = _weight(cost, draft.bases[place].error(plan))
    return found


def _weight(cost: float, error: float) -> float:
    return max(cost, _FLOOR) / max(error, 1e-30)


def restore_one(coders: Sequence[Coder], probes: Probes, tell: Tell) -> list[float]:
    """What the divergence loses when each layer alone is the consumer's own, in nats."""
    states = probes.all_decoded(coders)
    base, gains = probes.divergence(states), []
    for layer in range(len(coders)):
        others = {index: held for index, held in states.items() if index != layer}
        gains.append(base - probes.divergence(others))
        tell(layer + 1, len(coders))
    return gains


def greedy_patches(
    draft: Draft, probes: Probes, bits: float, pool: Sequence[int], tell: Tell
) -> list[tuple[int, float]]:
    """Layers to patch, in the order they were added, with the divergence after each.

    Args:
        draft: With bases and weights of all that may travel.
        probes: To measure on.
        bits: Of a token.
        pool: Layers that may be patched.
        tell: Told after each candidate.
    """
    settings, chosen = draft.settings, []
    before, left, done = measure(draft, probes, bits, ()), list(pool), 0
    most = sum(len(pool) - taken for taken in range(min(settings.patches, len(pool))))
    while left and len(chosen) < settings.patches:
        tried = {}
        for layer in left:
            tried[layer] = measure(draft, probes, bits, {layer, *(c for c, _ in chosen)})
            done += 1
            tell(done, most)
        best = min(tried, key=lambda layer: tried[layer])
        if tried[best] > before * (1 - settings.least_gain):
            break
        chosen.append((best, tried[best]))
        left.remove(best)
        before = tried[best]
    return chosen


def least_bits(
    draft: Draft, probes: Probes, most_divergence: float, patches: Collection[int]
) -> float:
    """The fewest bits of a token within a divergence, to about a hundredth.

    Raises:
        ConfigError: When even the whole code diverges more.
    """
    high = float(draft.most_bits())
    reached = probes.divergence(probes.all_decoded(draft.coders(draft.full_plans(patches))))
    if reached > most_divergence:
        raise ConfigError(
            f"at full rank the codec still diverges by {reached:.4f} nats, more than the "
            f"{most_divergence:g} wanted: allow more, widen the codes, or give more texts"
        )
    return _bisect(lambda bits: measure(draft, probes, bits, patches) <= most_divergence, high)


def _bisect(holds: Callable[[float], bool], high: float) -> float:
    low = 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        try:
            enough = holds(middle)
        except ConfigError:
            enough = False
        low, high = (low, middle) if enough else (middle, high)
    return high
