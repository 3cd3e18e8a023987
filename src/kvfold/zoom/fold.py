"""Which exact tokens become spans, decided once for all layers at the end of a forward.

SeKV (arXiv 2606.31145). Departures: tokens that come one at a time, as generated ones do, are never
anchors, since the model itself found them likely; and anchors are so few that they, and the runs
between them that are too short for a span, fit their part of the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvfold.cache.slots import Slots
from kvfold.zoom.segment import Segmentation, anchor_threshold, anchors, segment
from kvfold.zoom.spans import Fold

_MOST_NATS = 1e6
"""More surprisal than any finite logits give."""


Weighting = Literal["surprisal", "even"]
"""As much as they surprise, or all the same."""


@dataclass(frozen=True, slots=True)
class Segmenting:
    """How a text is divided."""

    sinks: int
    """First tokens that stay exact, where the budget has room for them."""
    deviations: float
    """Standard deviations above the mean surprisal from which a token is an anchor."""
    shortest: int
    """Tokens of the shortest span; shorter runs stay exact."""
    longest: int
    """Tokens of the longest span; longer runs are cut evenly."""
    weighting: Weighting = "surprisal"
    """What the tokens of a span count for in its means."""


def plan_fold(
    slots: Slots,
    surprisal: torch.Tensor,
    settled: torch.Tensor,
    until: torch.Tensor,
    segmenting: Segmenting,
    most: torch.Tensor,
    sinks: torch.Tensor,
) -> Fold:
    """Divide the exact tokens that are not settled yet.

    Args:
        slots: Of a layer; all layers hold the same tokens in the same slots.
        surprisal: Of each slot in nats, `[B, T]`.
        settled: Logical position before which everything was divided earlier, `[B]`.
        until: Logical position from which tokens stay exact for now, `[B]`.
        segmenting: How.
        most: Tokens of each row that may stay exact of those that are divided, sinks apart, `[B]`.
        sinks: First tokens of each row that stay exact, `[B]`.
    """
    positions = slots.positions[:, 0].long()
    is_due = (positions >= settled[:, None]) & (positions < until[:, None])
    order = _first(is_due, positions)
    due = is_due.gather(1, order)
    nats, where = surprisal.gather(1, order), positions.gather(1, order)
    found = [
        _segment(nats[row, None], where[row, None], due[row, None], segmenting, room, first)
        for row, (room, first) in enumerate(zip(most.tolist(), sinks.tolist(), strict=True))
    ]
    span_of = torch.cat([each.span_of for each, _ in found])
    count = max(int(each.counts) for each, _ in found)
    in_span = span_of >= 0
    picked = _first(in_span, span_of)
    is_token = in_span.gather(1, picked)
    tokens, span_of = order.gather(1, picked), span_of.gather(1, picked)
    span_of = torch.where(is_token, span_of, count)
    lengths = span_of.new_zeros(len(span_of), count + 1)
    lengths = lengths.scatter_add_(1, span_of, torch.ones_like(span_of))[:, :count]
    stays = (positions >= 0) & ~torch.zeros_like(is_due).scatter(1, tokens, is_token)
    stay = _first(stays, positions)
    return Fold(
        tokens=tokens,
        positions=torch.where(is_token, positions.gather(1, tokens), -1),
        span_of=span_of,
        weights=_weights(_worth(surprisal.gather(1, tokens), segmenting), span_of, lengths),
        lengths=lengths,
        stay=stay[:, None],
        held=stays.gather(1, stay)[:, None],
        anchors=where.masked_fill(~torch.cat([is_anchor for _, is_anchor in found]), -1),
    )


def _first(chosen: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Indices of the chosen, in ascending order, as many as any row has, `[B, N]`; then others."""
    last = torch.iinfo(order.dtype).max
    indices = order.masked_fill(~chosen, last).argsort(dim=1, stable=True)
    return indices[:, : int(chosen.sum(1).max())]


def _segment(
    surprisal: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    how: Segmenting,
    most: int,
    sinks: int,
) -> tuple[Segmentation, torch.Tensor]:
    """Segment one row, `[1, N]`, with as many anchors as leave at most `most` tokens exact.

    The first `sinks` of its text are exact besides.

    Returns:
        The segmentation, and whether each token is an anchor, `[1, N]`.
    """
    thresholds = anchor_threshold(surprisal, tokens, how.deviations)
    is_sink = (positions < sinks) & tokens
    allowed = most
    while True:
        found = anchors(surprisal, tokens, thresholds, sinks=0, most=allowed) | is_sink
        divided = segment(found, tokens, shortest=how.shortest, longest=how.longest)
        exact = (tokens & (divided.span_of < 0) & ~is_sink).sum(1)
        if allowed == 0 or int(exact) <= most:
            return divided, found
        allowed //= 2


def _worth(surprisal: torch.Tensor, how: Segmenting) -> torch.Tensor:
    """What each token counts for, before spans divide it."""
    return surprisal if how.weighting == "surprisal" else torch.zeros_like(surprisal)


def _weights(surprisal: torch.Tensor, span_of: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Each token's share of its span's surprisal, the same for all where there is none."""
    batch, count = lengths.shape
    # What is infinite takes all, and sums do not overflow.
    surprisal = surprisal.nan_to_num(nan=0.0).clamp(0.0, _MOST_NATS)
    sums = surprisal.new_zeros(batch, count + 1).scatter_add_(1, span_of, surprisal)
    total = sums.gather(1, span_of)
    even = torch.nn.functional.pad(lengths, (0, 1), value=1).gather(1, span_of)
    return torch.where(total > 0, surprisal / total, 1 / even.to(surprisal.dtype))
