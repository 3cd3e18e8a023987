"""What ranks spans: the contract between the spans of a layer and their router."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from kvfold.attention import Scoring


@dataclass(frozen=True, slots=True, eq=False)
class NewSpans:
    """What a router learns of spans as they are made."""

    keys: torch.Tensor
    """Of their tokens, `[B, G, N, D]`, rotated."""
    tokens: torch.Tensor
    """False where a row has fewer, `[B, N]`."""
    mean_keys: torch.Tensor
    """Of each span, weighted by surprisal, `[B, G, S, D]`."""
    moment: torch.Tensor | None
    """Sum of the outer products of the queries so far, `[B, G, D, D]`; None when no row is new."""
    in_rows: torch.Tensor
    """Rows that had a span before, `[B]`."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Which tokens each span has, among those of the spans of its row."""

    starts: torch.Tensor
    """First one, `[B, S]`."""
    ends: torch.Tensor
    """After the last one, `[B, S]`: that of its start where a row has fewer spans."""

    @property
    def are_empty(self) -> torch.Tensor:
        """Where a row has fewer spans, `[B, 1, 1, S]`."""
        return (self.starts == self.ends)[:, None, None]

    def sums(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sums over each span, `[B, G, Q, S]`, of numbers of tokens, `[B, G, Q, T]`.

        They are differences of running sums: spans are many, and of all lengths.
        """
        running = torch.nn.functional.pad(numbers.cumsum(-1), (1, 0))
        first, last = (
            running.gather(-1, ends[:, None, None].expand(*numbers.shape[:-1], -1))
            for ends in (self.starts, self.ends)
        )
        return last.sub_(first)


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """What queries make of spans."""

    masses: torch.Tensor
    """The logarithm of what each span weighs unless it is expanded, `[B, G, H/G, Q, S]` in float32;
    minus infinity where a row has fewer spans."""
    gates: torch.Tensor | None = None
    """By how much each gate exceeds its threshold, likewise: a head reads the tokens of a span, and
    not its mean, where that is above 0. Without gates all heads of a group do, of the heaviest."""


class Router(Protocol):
    """Ranks the spans of one layer from what it holds of them on the fast tier."""

    needs_queries: bool
    """Whether the moment of the queries is wanted, as long as a row has no span."""

    def add(self, new: NewSpans) -> None:
        """Append new spans."""
        ...

    def route(self, query: torch.Tensor, ranges: Ranges, scoring: Scoring) -> Routed:
        """Weigh all spans.

        Args:
            query: `[B, G, H/G, Q, D]`, rotated and scaled.
            ranges: Of the spans.
            scoring: How scores are made.
        """
        ...

    @property
    def bytes_fast(self) -> int:
        """All tensors that a query reads."""
        ...

    @property
    def bytes_slow(self) -> int:
        """What only new spans need."""
        ...

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to every tensor."""
        ...

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name."""
        ...

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        ...
