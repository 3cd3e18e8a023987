"""What one layer is given in one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.attention import LazyMask, Scoring


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """What one layer is given in one forward."""

    query: torch.Tensor
    """`[B, H, Q, D]`, rotated; of the last Q of N new tokens, where the others' are not known."""
    mask: LazyMask
    """Which keys a query sees."""
    positions: torch.Tensor
    """Logical positions of the new tokens, `[B, N]` or `[1, N]`; negative for padding."""
    scoring: Scoring
    """How the model makes scores."""
