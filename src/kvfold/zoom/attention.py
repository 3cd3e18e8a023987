"""One softmax over exact tokens, spans as they are summarised, and the tokens of expanded spans.

SeKV (arXiv 2606.31145). A span that is not expanded enters with its estimated attention mass, where
the paper has the score of its mean key and its length, and its mean value. Which are expanded is
chosen for each kv head and query: those that take the largest share of any of its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.attention import Scoring
from kvfold.zoom.spans import Spans

_LOWEST = -60.0
"""Below the highest estimate: less makes no difference, and denormal numbers are slow."""


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
    query: torch.Tensor, exact: Exact, spans: Spans, expanded: int, scoring: Scoring
) -> torch.Tensor:
    """Attention over both resolutions.

    Args:
        query: `[B, H, Q, D]`, rotated, all newer than every span.
        exact: The tokens of full resolution.
        spans: The others; not empty.
        expanded: E, the most spans that a kv head and query expand.
        scoring: How scores are made.

    Returns:
        `[B, H, Q, D]`.
    """
    groups = exact.keys.shape[1]
    query = (query * scoring.scaling).unflatten(1, (groups, -1))
    near = scoring.capped(_products(query, exact.keys).float())
    if exact.visible is not None:
        near = near.masked_fill(~exact.visible.unsqueeze(2), -torch.inf)
    far = span_masses(query, spans, scoring)
    scores = torch.cat([near, far, *_sinks(scoring, near)], dim=-1)
    of_spans = slice(near.shape[-1], near.shape[-1] + far.shape[-1])
    chosen = choose(scores, of_spans, expanded)
    inside, values = _expanded(query, chosen, spans, scoring)
    zoomed = chosen.unsqueeze(2).expand(*far.shape[:-1], -1)
    scores[..., of_spans].scatter_(-1, zoomed, -torch.inf)
    weights = torch.softmax(torch.cat([inside, scores], dim=-1), dim=-1).to(query.dtype)
    inside, weights = weights.split([inside.shape[-1], scores.shape[-1]], dim=-1)
    output = _products(weights[..., : of_spans.start], exact.values.transpose(-1, -2))
    output += _products(weights[..., of_spans], spans.means.transpose(-1, -2))
    output += (inside.transpose(2, 3) @ values).transpose(2, 3)
    return output.flatten(1, 2)


def _expanded(
    query: torch.Tensor, chosen: torch.Tensor, spans: Spans, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the tokens of expanded spans, and their values.

    Args:
        query: `[B, G, H/G, Q, D]`, scaled.
        chosen: Spans of each query, `[B, G, Q, E]`.
        spans: All there are.
        scoring: How scores are made.

    Returns:
        `[B, G, H/G, Q, E * L]` in float32, minus infinity where a span is shorter than L, and
        `[B, G, Q, E * L, D]`.
    """
    found = spans.expand(chosen)
    tokens = found.tokens.flatten(3, 4).to(query.dtype)
    keys, values = tokens.split([query.shape[-1], tokens.shape[-1] - query.shape[-1]], dim=-1)
    scores = query.transpose(2, 3) @ keys.transpose(-1, -2)
    scores = scoring.capped(scores.transpose(2, 3).float())
    is_token = found.is_token.flatten(3).unsqueeze(2)
    return scores.masked_fill(~is_token, -torch.inf), values


def span_masses(query: torch.Tensor, spans: Spans, scoring: Scoring) -> torch.Tensor:
    """The estimated logarithm of what each span would weigh, were it expanded.

    Args:
        query: `[B, G, H/G, Q, D]`, scaled.
        spans: Of S spans.
        scoring: How scores are made.

    Returns:
        `[B, G, H/G, Q, S]` in float32; minus infinity where a row has fewer spans.
    """
    scores, level = spans.estimate(query.flatten(2, 3))
    if scoring.softcap is not None:
        scores, level = scoring.capped(scores + level), torch.zeros_like(level)
        scores[..., 0] = -torch.inf
    highest = scores.detach().amax(-1, keepdim=True)
    # Sums over a span are differences of running sums: spans are many, and of all lengths.
    sums = scores.sub_(highest).clamp_min_(_LOWEST).exp_().cumsum(-1)
    shape = (*sums.shape[:-1], -1)
    first, last = (ends[:, None, None] for ends in (spans.starts, spans.ends))
    mass = sums.gather(-1, last.expand(shape)) - sums.gather(-1, first.expand(shape))
    tiny = torch.finfo(mass.dtype).tiny
    mass = mass.clamp_min_(tiny).log_().add_(highest + level)
    mass = mass.masked_fill_(last == first, -torch.inf)
    return mass.unflatten(2, query.shape[2:4])


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
    shares = torch.softmax(scores.detach(), dim=-1)[..., spans].amax(2)
    return shares.topk(min(expanded, shares.shape[-1]), dim=-1, sorted=False).indices


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
