"""Ranks spans by their mean keys: SeKV's own routing (arXiv 2606.31145).

A span that is not expanded scores as its mean key does, plus the logarithm of its length. Trained
gates say which spans a head expands; without them those of the highest scores are. A routing key
need not be held: the mean key and the length of its projection give the same gate.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch

from kvfold.attention import Scoring
from kvfold.zoom.gates import Gates
from kvfold.zoom.growing import Growing
from kvfold.zoom.routing import NewSpans, Ranges, Routed


class SummaryRouter:
    """The mean keys of a layer's spans."""

    needs_queries = False

    def __init__(self, gates: Gates | None, layer: int) -> None:
        """Start without spans.

        Args:
            gates: Of the model; None to route by the score of the mean key.
            layer: Which of the layers that zoom this is, from 0.
        """
        self.gates, self._layer = gates, layer
        held = {"mean_keys": 2} if gates is None else {"mean_keys": 2, "norms": 2}
        self._held = Growing(held)

    def __deepcopy__(self, memo: dict[int, object]) -> SummaryRouter:
        """Copy what is held; the gates are the model's and never change."""
        other = SummaryRouter(self.gates, self._layer)
        other._held = copy.deepcopy(self._held, memo)
        return other

    @torch.no_grad()
    def add(self, new: NewSpans) -> None:
        """Append new spans."""
        tensors = {"mean_keys": new.mean_keys}
        if self.gates is not None:
            norms = self.gates.norms(self._layer, new.mean_keys)
            tensors["norms"] = norms.to(new.mean_keys.dtype)
        self._held.append(tensors)

    def route(self, query: torch.Tensor, ranges: Ranges, scoring: Scoring) -> Routed:
        """Weigh each span by the score of its mean key and its length."""
        means, lengths = self._held["mean_keys"], ranges.ends - ranges.starts
        scores = query.flatten(2, 3) @ means.to(query.dtype).mT
        scores = scoring.capped(scores.float().unflatten(2, query.shape[2:4]))
        masses = scores + lengths.float().log()[:, None, None, None]
        return Routed(masses, self._excess(query, lengths))

    @torch.no_grad()
    def _excess(self, query: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor | None:
        if self.gates is None:
            return None
        layer, means, norms = self._layer, self._held["mean_keys"], self._held["norms"]
        logits = self.gates.logits(layer, query, means, norms.float(), lengths)
        thresholds = self.gates.thresholds_of(layer).to(logits.device)
        return logits - thresholds.view(1, *query.shape[1:3], 1, 1)

    @property
    def bytes_fast(self) -> int:
        """All tensors."""
        return self._held.nbytes

    @property
    def bytes_slow(self) -> int:
        """Nothing."""
        return 0

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to every tensor."""
        self._held.map(change)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name."""
        return self._held.state()

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        self._held.load(tensors)
