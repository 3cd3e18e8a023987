"""What a calibration tells of its choice: divergence by payload, and how errors grow.

Lemma 5.1 of SCD (arXiv 2606.07684) bounds a layer's error by that of the layer before,
`e_(l+1) <= alpha_l e_l + beta_l eps`, and says that a patch starts it anew. What is measured is the
error of what each layer is given while the consumer goes on from the decoded prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from kvfold.errors import ConfigError
from kvfold.transfer.choose import measure
from kvfold.transfer.draft import Draft
from kvfold.transfer.probes import Probes
from kvfold.transfer.streams import Tell

_STEPS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
"""Of the bits that were chosen."""


def payload_curve(
    draft: Draft,
    probes: Probes,
    bits: float,
    patches: Collection[int],
    share: Callable[[float], float],
    tell: Tell,
) -> list[tuple[float, float]]:
    """(share of raw, divergence) about the bits that were chosen, before decoders are refitted.

    Args:
        draft: With all bases and weights.
        probes: To measure on.
        bits: Of a token, as chosen.
        patches: Layers that are patched.
        share: From bits to the share of raw that the whole message takes.
        tell: Told after each.
    """
    found: list[tuple[float, float]] = []
    for done, step in enumerate(_STEPS, start=1):
        try:
            point = share(step * bits), measure(draft, probes, step * bits, patches)
        except ConfigError:
            # So few bits do not reach for a single channel.
            point = None
        if point is not None and point not in found:
            found.append(point)
        tell(done, len(_STEPS))
    return found
