"""Expanded spans on the fast tier: those that are still wanted stay, and only the others move.

SeKV (arXiv 2606.31145) counts what is expanded at a step in the budget; its release never frees it.
Here the pool has a place for each span that a kv head may expand, and a span that is wanted next
takes the place of one that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Fetch = Callable[[torch.Tensor, torch.Tensor], "Fetched"]
"""From rows with their kv heads, `row * G + head`, and spans, `[N]` each, to their tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """Tokens of spans on the fast tier."""

    tokens: torch.Tensor
    """Keys and values, `[*, L, 2D]`."""
    is_token: torch.Tensor
    """False where a span is shorter than L, `[*, L]`."""


class Pool:
    """The expanded spans of one layer, E a row and kv head."""

    def __init__(self, spans: torch.Tensor, fetched: Fetched) -> None:
        """Start with some spans.

        Args:
            spans: E different ones a row and kv head, `[B, G, E]`.
            fetched: Their tokens, `[B, G, E, ...]`.
        """
        self._spans, self._fetched = spans, fetched

    @property
    def places(self) -> torch.Size:
        """B, G and E."""
        return self._spans.shape

    @property
    def is_frozen(self) -> bool:
        """Whether it was filled under `torch.inference_mode` and cannot be written outside it."""
        return self._spans.is_inference() and not torch.is_inference_mode_enabled()

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(t.nbytes for t in (self._spans, self._fetched.tokens, self._fetched.is_token))

    def bring(self, chosen: torch.Tensor, fetch: Fetch) -> None:
        """Hold these spans and no others.

        Args:
            chosen: E different spans a row and kv head, `[B, G, E]`.
            fetch: Brings spans.
        """
        is_here = chosen.unsqueeze(-1) == self._spans.unsqueeze(-2)
        missing = (~is_here.any(-1)).flatten().nonzero().squeeze(1)
        if not len(missing):
            return
        # In every row and kv head as many places are free as spans are missing.
        places = (~is_here.any(-2)).flatten().nonzero().squeeze(1)
        spans = chosen.flatten().index_select(0, missing)
        new = fetch(missing // chosen.shape[2], spans)
        # Whole spans are copied at once.
        self._spans.view(-1).index_copy_(0, places, spans)
        self._fetched.tokens.flatten(0, 2).index_copy_(0, places, new.tokens)
        self._fetched.is_token.flatten(0, 2).index_copy_(0, places, new.is_token)

    @property
    def held(self) -> tuple[torch.Tensor, Fetched]:
        """The spans in the order in which they stand, `[B, G, E]`, and their tokens."""
        return self._spans, self._fetched
