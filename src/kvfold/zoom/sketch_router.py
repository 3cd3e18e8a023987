"""Ranks spans by the attention mass that the sketches of their tokens add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kvfold.attention import Scoring
from kvfold.zoom.growing import Growing
from kvfold.zoom.routing import NewSpans, Ranges, Routed
from kvfold.zoom.sketch import Sketch

_LEAST = torch.finfo(torch.float32).tiny
"""Share of a span of which no sum is left."""
_SKETCH = ("look", "center", "write")


class SketchRouter:
    """The codes of all tokens of a layer's spans; see `kvfold.zoom.sketch`."""

    needs_queries = True

    def __init__(self, directions: int) -> None:
        """Start without spans.

        Args:
            directions: R of the sketch.
        """
        self._directions = directions
        self.sketch: Sketch | None = None
        self._codes = Growing({"codes": 3})

    @property
    def codes(self) -> torch.Tensor:
        """Of every token of a span, `[B, G, R / 2, T]`."""
        return self._codes["codes"]

    def add(self, new: NewSpans) -> None:
        """Append new spans; the first of a row give the directions."""
        if new.moment is not None:
            fitted = Sketch.fit(new.keys, new.tokens, new.moment, self._directions)
            known = self.sketch
            self.sketch = fitted if known is None else known.where(new.in_rows, fitted)
        assert self.sketch is not None, "the first spans come with the moment of the queries"
        self._codes.append({"codes": self.sketch.encode(new.keys, new.tokens)})

    def estimate(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Estimated products of scaled queries `[B, G, Q, D]` with tokens; see `Sketch.scores`."""
        assert self.sketch is not None, "there are spans"
        return self.sketch.scores(query, self.codes)

    def route(self, query: torch.Tensor, ranges: Ranges, scoring: Scoring) -> Routed:
        """Weigh each span by the estimated scores of its tokens."""
        scores, level = self.estimate(query.flatten(2, 3))
        if scoring.softcap is not None:
            scores, level = scoring.capped(scores + level), torch.zeros_like(level)
        highest = scores.amax(-1, keepdim=True)
        shares = torch.softmax(scores, dim=-1)
        total = highest + level - shares.amax(-1, keepdim=True).log()
        mass = ranges.sums(shares).clamp_min_(_LEAST).log_().add_(total)
        mass = mass.masked_fill_(ranges.are_empty, -torch.inf)
        return Routed(mass.unflatten(2, query.shape[2:4]))

    @property
    def bytes_fast(self) -> int:
        """The codes, and what a query is turned by."""
        return self._codes.nbytes + (0 if self.sketch is None else self.sketch.bytes_fast)

    @property
    def bytes_slow(self) -> int:
        """What keys are turned by."""
        return 0 if self.sketch is None else self.sketch.bytes_slow

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to every tensor."""
        self._codes.map(change)
        self._take({name: change(tensor) for name, tensor in self._factors().items()})

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name."""
        yield from self._codes.state()
        yield from self._factors().items()

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        self._codes.load(tensors)
        self._take(tensors)

    def _factors(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self.sketch, name) for name in _SKETCH}

    def _take(self, tensors: dict[str, torch.Tensor]) -> None:
        self.sketch = Sketch(**{name: tensors[name] for name in _SKETCH})
