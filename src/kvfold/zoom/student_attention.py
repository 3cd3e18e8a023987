"""Attention over spans at two resolutions, with a gradient to what is expanded.

SeKV (arXiv 2606.31145), for sampled positions of one text. Axis letters besides those of all files:
N tokens of the longest span.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.attention import Scoring
from kvfold.zoom.teacher import Division

_MOST_EXCESS = 4.0
"""Nats by which what was not chosen may outweigh all that was: gradients stay bounded."""


@dataclass(frozen=True, slots=True, eq=False)
class ExactTokens:
    """What queries see as it is."""

    keys: torch.Tensor
    """Of the text, `[1, G, T, D]`."""
    values: torch.Tensor
    """`[1, G, T, D]`."""
    visible: torch.Tensor
    """Which of them each query sees as they are, `[Q, T]`."""
    own_keys: torch.Tensor
    """Of the queries' own tokens, which each sees of itself alone, `[1, G, Q, D]`."""
    own_values: torch.Tensor
    """`[1, G, Q, D]`."""


@dataclass(frozen=True, slots=True, eq=False)
class SpanTokens:
    """What queries see of spans."""

    means: torch.Tensor
    """Mean keys, `[1, G, S, D]`."""
    value_means: torch.Tensor
    """`[1, G, S, D]`."""
    keys: torch.Tensor
    """Rebuilt from factors, span by span, `[1, G, S * N, D]`."""
    values: torch.Tensor
    """`[1, G, S * N, D]`."""
    division: Division
    """Which tokens they are."""
    seen: torch.Tensor
    """Which spans each query sees, `[Q, S]`."""
    expand: torch.Tensor
    """1 where a query expands a span and 0 where not, `[1, G, H/G, Q, S]`."""


def student_attention(
    query: torch.Tensor, exact: ExactTokens, spans: SpanTokens | None, scoring: Scoring
) -> torch.Tensor:
    """One softmax over exact tokens, spans as they are summarised, and tokens of expanded spans.

    A span that is not expanded has the score of its mean key and the logarithm of its length. What
    was not chosen has no weight, but a gradient to the choice.

    Args:
        query: `[1, G, H/G, Q, D]`, rotated and scaled.
        exact: Tokens that are seen as they are.
        spans: The others.
        scoring: How the model makes scores.

    Returns:
        `[1, G, H/G, Q, D]`.
    """
    near = scoring.capped(_products(query, exact.keys)).masked_fill(~exact.visible, -torch.inf)
    own = scoring.capped((query * exact.own_keys.unsqueeze(2)).sum(-1, keepdim=True))
    parts, values = [near, own], [exact.values, None]
    chosen: list[torch.Tensor | None] = [None, None]
    if spans is not None:
        parts += _span_scores(query, spans, scoring)
        values += [spans.value_means, spans.values]
        longest = spans.division.places.shape[1]
        inside = spans.expand.unsqueeze(-1).expand(*spans.expand.shape, longest).flatten(-2)
        chosen += [1 - spans.expand, inside]
    sinks = None if scoring.sinks is None else scoring.sinks.float().view(*query.shape[1:3], 1, 1)
    top = _highest(parts, chosen, sinks)
    weights = [_weights(part - top, choice) for part, choice in zip(parts, chosen, strict=True)]
    total = sum(weight.sum(-1, keepdim=True) for weight in weights)
    total = total if sinks is None else total + (sinks - top).exp()
    output = weights[1] * exact.own_values.unsqueeze(2)
    for weight, value in zip(weights, values, strict=True):
        if value is not None:
            output = output + _products(weight, value.transpose(-1, -2))
    return output / total


def _span_scores(
    query: torch.Tensor, spans: SpanTokens, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of spans as they are summarised `[.., Q, S]`, and of their tokens `[.., Q, S * N]`."""
    division = spans.division
    far = scoring.capped(_products(query, spans.means)) + division.lengths.float().log()
    inside = scoring.capped(_products(query, spans.keys))
    seen_tokens = (spans.seen.unsqueeze(-1) & division.is_token).flatten(-2)
    return (
        far.masked_fill(~spans.seen, -torch.inf),
        inside.masked_fill(~seen_tokens, -torch.inf),
    )


@torch.no_grad()
def _highest(
    parts: list[torch.Tensor], chosen: list[torch.Tensor | None], sinks: torch.Tensor | None
) -> torch.Tensor:
    """The highest score among what was chosen, `[1, G, H/G, Q, 1]`."""
    tops = [
        (part if choice is None else part.masked_fill(choice == 0, -torch.inf)).amax(-1)
        for part, choice in zip(parts, chosen, strict=True)
        if part.shape[-1]
    ]
    top = torch.stack(tops).amax(0).unsqueeze(-1)
    return top if sinks is None else top.maximum(sinks)


def _weights(scores: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
    return scores.exp() if chosen is None else chosen * scores.clamp_max(_MOST_EXCESS).exp()


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`[1, G, H/G, Q, X]` times the transpose of `[1, G, Y, X]`."""
    packed = left.flatten(2, 3) @ right.transpose(-1, -2)
    return packed.unflatten(2, left.shape[2:4])


def straight_through(hard: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
    """1 where `hard` is true and 0 elsewhere, exactly, with the gradient of `soft`."""
    return hard.to(soft.dtype) + (soft - soft.detach())
