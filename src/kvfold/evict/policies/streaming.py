"""streaming: attention sinks and the most recent tokens.

StreamingLLM (Xiao et al., arXiv 2309.17453). Positions stay logical here, where the paper renumbers
the kept tokens inside the cache: keys carry the rotation they were stored with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.cache.slots import Slots
from kvfold.evict.policy import Policy, register_policy


@register_policy("streaming")
@dataclass(frozen=True, slots=True)
class Streaming(Policy):
    """The newer a token, the longer it stays; the sinks are the protected set's."""

    summary = "the first tokens and the most recent ones (StreamingLLM)"
    scopes = ("layer", "token")

    def score(self, slots: Slots) -> torch.Tensor:
        """The logical position, `[B, P, T]`."""
        return slots.positions.float()
