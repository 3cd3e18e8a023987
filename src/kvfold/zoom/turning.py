"""Turning the keys of a span to the position of its first token, and back.

SeKV (arXiv 2606.31145) factorises keys before RoPE, where those of a span are alike. The tokens of
a span follow one another, so that turning each back by its distance from the first gives the keys
before RoPE but for one turn that all have in common: singular values, and what a rank leaves out,
are the same. The angles are then the same for all spans, and need neither positions nor the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvfold.errors import UnsupportedModelError
from kvfold.models import angles, probe_rope
from kvfold.models.probe import RopeFinding
from kvfold.ops.rotary import rotate, unrotate


@dataclass(frozen=True, slots=True, eq=False)
class Turning:
    """The angles of one layer at distances 0 to L - 1."""

    cosines: torch.Tensor
    """`[L, D']` in float32, D' the rotated dims."""
    sines: torch.Tensor
    """`[L, D']`."""
    is_interleaved: bool
    """Whether the two dims of a pair are neighbours."""

    def __deepcopy__(self, memo: dict[int, object]) -> Turning:
        """Itself: it follows from the model and never changes."""
        return self

    def back(self, keys: torch.Tensor) -> torch.Tensor:
        """Rotated keys of a span or its beginning, `[*, L, D]`, turned to the first's position."""
        return unrotate(keys, *self._at(keys), interleaved=self.is_interleaved)

    def forth(self, keys: torch.Tensor) -> torch.Tensor:
        """The inverse of `back`."""
        return rotate(keys, *self._at(keys), interleaved=self.is_interleaved)

    def _at(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        length = keys.shape[-2]
        return self.cosines[:length].to(keys.device), self.sines[:length].to(keys.device)


def turnings(model: PreTrainedModel, longest: int) -> list[Turning | None]:
    """How each layer with full attention turns the keys of a span.

    Args:
        model: It runs a few tokens once, which tells how its layers rotate.
        longest: L, tokens of the longest span.

    Returns:
        None for a layer that does not rotate its keys.

    Raises:
        UnsupportedModelError: When it rotates some in another way than kvfold knows.
    """
    findings = probe_rope(model)
    layers = DynamicCache(config=model.config).layers
    own = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer]
    return [_turning(model, index, findings[index], longest) for index in own]


@torch.no_grad()
def _turning(
    model: PreTrainedModel, index: int, finding: RopeFinding, longest: int
) -> Turning | None:
    if finding == "nope":
        return None
    found = None
    if finding != "unknown":
        found = angles(model, index, torch.arange(longest, device=model.device)[None])
    if found is None:
        raise UnsupportedModelError(
            f"sekv cannot factorise the keys of layer {index} of {type(model).__name__}, which are "
            "rotated in a way that kvfold does not know: leave factors out"
        )
    cosines, sines = (each[0, 0] for each in found)
    return Turning(cosines, sines, finding == "interleaved")
