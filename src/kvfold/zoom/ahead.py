"""Spans that are on their way before they are asked for.

Not in the paper (SeKV, arXiv 2606.31145). What a generated token nearly expanded, the next one may:
these spans come from the slow tier while the layers in between compute.
"""

from __future__ import annotations

import torch

from kvfold.zoom.lane import Coming
from kvfold.zoom.pool import Fetch, Fetched


def runners_up(numbers: torch.Tensor, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """The spans that come right behind those that were expanded.

    Args:
        numbers: By which heads rank spans, `[B, G, H/G, Q, S]`.
        chosen: Expanded ones, `[B, G, Q, E]`.
        count: A, at most S - E.

    Returns:
        `[B, G, Q, A]`.
    """
    ranked = numbers.detach().amax(2).scatter(-1, chosen, -torch.inf)
    return ranked.topk(count, dim=-1, sorted=False).indices


class Ahead:
    """Spans of one layer that come before they are asked for, A a row and kv head."""

    def __init__(self, spans: torch.Tensor, is_token: torch.Tensor, coming: Coming) -> None:
        """Note which.

        Args:
            spans: Different ones a row and kv head, `[B * G, A]`.
            is_token: False where a span is shorter than L, `[B * G * A, L]`.
            coming: Their tokens, `[B * G * A * L, 2D]`.
        """
        self._spans, self._is_token, self._coming = spans, is_token, coming

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return self._spans.nbytes + self._is_token.nbytes + self._coming.nbytes

    def serve(self, owners: torch.Tensor, spans: torch.Tensor, fetch: Fetch) -> Fetched:
        """The tokens of spans: those that came ahead, and others that are brought now.

        Args:
            owners: Row and kv head of each, `row * G + head`, `[N]`.
            spans: Their numbers, `[N]`.
            fetch: Brings the others.

        Returns:
            Tokens `[N, L, 2D]`.
        """
        is_it = self._spans.index_select(0, owners) == spans[:, None]
        is_here = is_it.any(-1)
        # Those that are here come first; one number is waited for.
        order, count = is_here.int().argsort(descending=True, stable=True), int(is_here.sum())
        if not count:
            return fetch(owners, spans)
        here, others = order[:count], order[count:]
        places = owners * self._spans.shape[1] + is_it.int().argmax(-1)
        found = self._take(places.index_select(0, here))
        if len(others):
            brought = fetch(owners.index_select(0, others), spans.index_select(0, others))
            found = Fetched(
                torch.cat([found.tokens, brought.tokens]),
                torch.cat([found.is_token, brought.is_token]),
            )
        back = order.argsort()
        return Fetched(found.tokens.index_select(0, back), found.is_token.index_select(0, back))

    def _take(self, places: torch.Tensor) -> Fetched:
        tokens = self._coming.wait().unflatten(0, self._is_token.shape)
        return Fetched(tokens.index_select(0, places), self._is_token.index_select(0, places))
