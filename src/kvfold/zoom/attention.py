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
    groups, count = exact.keys.shape[1], query.shape[2]
    query = (query * scoring.scaling).unflatten(1, (groups, -1))
    near = scoring.capped(_products(query, exact.keys).float())
    if exact.visible is not None:
        near = near.masked_fill(~exact.visible.unsqueeze(2), -torch.inf)
    far = span_masses(query, spans, scoring)
    chosen = choose(near, far, expanded, scoring)
    keys, values, is_token = (
        tensor.unflatten(2, (count, -1)) for tensor in spans.expand(chosen.flatten(2))
    )
    inside = torch.einsum("bgrqd,bgqtd->bgrqt", query, keys.to(query.dtype))
    inside = scoring.capped(inside.float()).masked_fill(~is_token.unsqueeze(2), -torch.inf)
    far = far.scatter(-1, chosen.unsqueeze(2).expand(*far.shape[:-1], -1), -torch.inf)
    parts = _softmax([near, far, inside], scoring)
    near, far, inside = (part.to(query.dtype) for part in parts)
    output = _products(near, exact.values.transpose(-1, -2))
    output += _products(far, spans.means.transpose(-1, -2))
    output += torch.einsum("bgrqt,bgqtd->bgrqd", inside, values.to(query.dtype))
    return output.flatten(1, 2)


def span_masses(query: torch.Tensor, spans: Spans, scoring: Scoring) -> torch.Tensor:
    """The estimated logarithm of what each span would weigh, were it expanded.

    Args:
        query: `[B, G, H/G, Q, D]`, scaled.
        spans: Of S spans.
        scoring: How scores are made.

    Returns:
        `[B, G, H/G, Q, S]` in float32; minus infinity where a row has fewer spans.
    """
    scores = spans.estimate(query.flatten(2, 3)).unflatten(2, query.shape[2:4])
    scores = scoring.capped(scores)
    highest = scores.amax(-1, keepdim=True)
    # Sums over a span are differences of running sums: spans are many, and of all lengths.
    sums = torch.nn.functional.pad((scores - highest).exp_().cumsum(-1), (1, 0))
    shape = (*sums.shape[:-1], -1)
    first = spans.starts.long()[:, None, None, None]
    last = first + spans.lengths[:, None, None, None]
    mass = sums.gather(-1, last.expand(shape)) - sums.gather(-1, first.expand(shape))
    tiny = torch.finfo(mass.dtype).tiny
    mass = mass.clamp_min_(tiny).log_().add_(highest)
    return mass.masked_fill_((last == first).expand(shape), -torch.inf)


def choose(near: torch.Tensor, far: torch.Tensor, expanded: int, scoring: Scoring) -> torch.Tensor:
    """The spans that a kv head expands.

    Args:
        near: Scores of exact tokens, `[B, G, H/G, Q, T]`.
        far: Logarithms of the spans' masses, `[B, G, H/G, Q, S]`.
        expanded: E.
        scoring: How scores are made.

    Returns:
        `[B, G, Q, min(E, S)]`.
    """
    total = torch.logaddexp(near.logsumexp(-1), far.logsumexp(-1))
    if scoring.sinks is not None:
        total = torch.logaddexp(total, _by_head(scoring.sinks, near)[..., 0])
    shares = (far - total.unsqueeze(-1)).amax(2)
    return shares.topk(min(expanded, far.shape[-1]), dim=-1).indices


def _products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`[B, G, H/G, Q, X]` times the transpose of `[B, G, Y, X]`."""
    packed = left.flatten(2, 3) @ right.to(left.dtype).transpose(-1, -2)
    return packed.unflatten(2, left.shape[2:4])


def _softmax(parts: list[torch.Tensor], scoring: Scoring) -> tuple[torch.Tensor, ...]:
    """One softmax over all parts, which are returned apart."""
    sizes = [part.shape[-1] for part in parts]
    if scoring.sinks is not None:
        extra = _by_head(scoring.sinks, parts[0])
        parts = [*parts, extra.expand(*parts[0].shape[:-1], 1)]
    weights = torch.softmax(torch.cat(parts, dim=-1), dim=-1)
    return weights[..., : sum(sizes)].split(sizes, dim=-1)


def _by_head(sinks: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Logits `[H]` in the place of scores `[B, G, H/G, Q, T]`: `[1, G, H/G, 1, 1]`."""
    return sinks.float().view(1, *scores.shape[1:3], 1, 1)
