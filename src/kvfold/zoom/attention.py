"""One softmax over exact tokens, spans as they are summarised, and the tokens of expanded spans.

SeKV (arXiv 2606.31145). A span that is not expanded enters with its estimated attention mass, where
the paper has the score of its mean key and its length, and its mean value. Which are expanded is
chosen for each kv head and query: those that take the largest share of any of its query heads, or
those whose trained gates exceed their thresholds by most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.attention import Scoring
from kvfold.zoom.ahead import runners_up
from kvfold.zoom.kernel import attend_natively
from kvfold.zoom.pool import Fetched
from kvfold.zoom.spans import Spans


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """The tokens that are always read as they are."""

    keys: torch.Tensor
    """`[B, G, T, D]`."""
    values: torch.Tensor
    """`[B, G, T, D]`."""
    visible: torch.Tensor | None
    """What a query sees, `[B, 1, Q, T]`; everything without it."""


def zoom_attention(
    query: torch.Tensor,
    exact: Exact,
    spans: Spans,
    expanded: int,
    scoring: Scoring,
    everything: Fetched | None = None,
) -> torch.Tensor:
    """Attention over both resolutions.

    Args:
        query: `[B, H, Q, D]`, rotated, all newer than every span.
        exact: The tokens of full resolution.
        spans: The others; not empty.
        expanded: E, the most spans that a kv head and query expand.
        scoring: How scores are made.
        everything: The tokens of all spans, `[B, G, 1, S, ...]`, where many queries would bring
            as many one by one; each still reads those of its own E spans alone.

    Returns:
        `[B, H, Q, D]`.
    """
    if everything is None:
        output = attend_natively(query, exact, spans, expanded, scoring)
        if output is not None:
            return output
    return _attend(query, exact, spans, expanded, scoring, everything)


def _attend(
    query: torch.Tensor,
    exact: Exact,
    spans: Spans,
    expanded: int,
    scoring: Scoring,
    everything: Fetched | None,
) -> torch.Tensor:
    """The same with torch."""
    groups = exact.keys.shape[1]
    query = (query * scoring.scaling).unflatten(1, (groups, -1))
    near = scoring.capped(_products(query, exact.keys).float())
    if exact.visible is not None:
        near = near.masked_fill(~exact.visible.unsqueeze(2), -torch.inf)
    routed = spans.route(query, scoring)
    scores = torch.cat([near, routed.masses, *_sinks(scoring, near)], dim=-1)
    of_spans = slice(near.shape[-1], near.shape[-1] + routed.masses.shape[-1])
    if routed.gates is None:
        chosen = choose(scores, of_spans, expanded)
    else:
        chosen = _highest(routed.gates, expanded)
    chosen, found, asked = _brought(chosen, spans, everything)
    where = chosen.unsqueeze(2).expand(*routed.masses.shape[:-1], -1)
    if routed.gates is not None:
        is_open = routed.gates.gather(-1, where) > 0
        asked = is_open if asked is None else is_open & asked
    if spans.tally is not None:
        spans.tally.add(chosen, asked, len(spans))
    inside, values = _inside(query, found, asked, scoring)
    _hide(scores[..., of_spans], where, asked)
    weights = torch.softmax(torch.cat([inside, scores], dim=-1), dim=-1).to(query.dtype)
    inside, weights = weights.split([inside.shape[-1], scores.shape[-1]], dim=-1)
    output = _products(weights[..., : of_spans.start], exact.values.transpose(-1, -2))
    output += _products(weights[..., of_spans], spans.means.transpose(-1, -2))
    output += _by_query(inside, values)
    if spans.ahead and everything is None and chosen.shape[2] == 1:
        numbers = weights[..., of_spans] if routed.gates is None else routed.gates
        spans.look_ahead(runners_up(numbers, chosen, spans.ahead)[:, :, 0])
    return output.flatten(1, 2)


def _hide(masses: torch.Tensor, where: torch.Tensor, asked: torch.Tensor | None) -> None:
    """Take away, in place, the masses of spans whose tokens a head reads.

    Args:
        masses: `[B, G, H/G, Q, S]`.
        where: Expanded spans, `[B, G, H/G, Q, E]`.
        asked: Whether the head reads them, `[B, G, H/G or 1, Q, E]`; all do without it.
    """
    if asked is None:
        masses.scatter_(-1, where, -torch.inf)
    else:
        masses.scatter_(-1, where, masses.gather(-1, where).masked_fill(asked, -torch.inf))


def _brought(
    chosen: torch.Tensor, spans: Spans, everything: Fetched | None
) -> tuple[torch.Tensor, Fetched, torch.Tensor | None]:
    """The tokens that queries may read.

    Args:
        chosen: Spans of each query, `[B, G, Q, E]`.
        spans: All there are, S.
        everything: The tokens of all, if they were brought already.

    Returns:
        Which spans there are, `[B, G, Q, E]` in any order or all S in order; their tokens; and
        whether a query has chosen them, `[B, G, 1, Q, S]`, where they are all.
    """
    if everything is None:
        return *spans.expand(chosen), None
    none = chosen.new_zeros((*chosen.shape[:-1], len(spans)), dtype=torch.bool)
    is_chosen = none.scatter(-1, chosen, value=True)
    every = torch.arange(len(spans), device=chosen.device).expand_as(is_chosen)
    return every, everything, is_chosen.unsqueeze(2)


def _inside(
    query: torch.Tensor, found: Fetched, asked: torch.Tensor | None, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the tokens of expanded spans, and their values.

    Args:
        query: `[B, G, H/G, Q, D]`, scaled.
        found: Tokens of the spans of each query, or of all of them, `[B, G, Q or 1, E, ...]`.
        asked: Whether a head reads them, `[B, G, H/G or 1, Q, E]`; all do without it.
        scoring: How scores are made.

    Returns:
        `[B, G, H/G, Q, E * L]` in float32, minus infinity for what is no token or not read, and
        `[B, G, Q or 1, E * L, D]`.
    """
    width = query.shape[-1]
    # What is converted side by side with nothing between is multiplied faster.
    keys, values = (
        side.to(query.dtype).flatten(3, 4)
        for side in found.tokens.split([width, found.tokens.shape[-1] - width], dim=-1)
    )
    scores = scoring.capped(_by_query(query, keys.transpose(-1, -2)).float())
    is_read = found.is_token.unsqueeze(2)
    if asked is not None:
        is_read = is_read & asked.unsqueeze(-1)
    return scores.masked_fill(~is_read.flatten(4), -torch.inf), values


def choose(scores: torch.Tensor, spans: slice, expanded: int) -> torch.Tensor:
    """The spans that a kv head expands.

    Args:
        scores: Of all that a query may attend to, `[B, G, H/G, Q, N]`, logarithms of masses where
            spans stand.
        spans: Where they stand, S of the N.
        expanded: E.

    Returns:
        `[B, G, Q, min(E, S)]`.
    """
    return _highest(torch.softmax(scores.detach(), dim=-1)[..., spans], expanded)


def _highest(numbers: torch.Tensor, expanded: int) -> torch.Tensor:
    """Spans by the highest number of any head of a group, from `[B, G, H/G, Q, S]`."""
    count = min(expanded, numbers.shape[-1])
    return numbers.amax(2).topk(count, dim=-1, sorted=False).indices


def _by_query(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`[B, G, H/G, Q, X]` times `[B, G, Q, X, Y]` of each query, or `[B, G, 1, X, Y]` of all."""
    if right.shape[2] == 1:
        return _products(left, right[:, :, 0].transpose(-1, -2))
    return (left.transpose(2, 3) @ right).transpose(2, 3)


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`[B, G, H/G, Q, X]` times the transpose of `[B, G, Y, X]`."""
    packed = left.flatten(2, 3) @ right.to(left.dtype).transpose(-1, -2)
    return packed.unflatten(2, left.shape[2:4])


def _sinks(scoring: Scoring, scores: torch.Tensor) -> list[torch.Tensor]:
    """The logit of attending to nothing, if there is one, beside scores `[B, G, H/G, Q, T]`."""
    if scoring.sinks is None:
        return []
    by_head = scoring.sinks.float().view(1, *scores.shape[1:3], 1, 1)
    return [by_head.expand(*scores.shape[:-1], 1)]
