"""Attention over kv heads without repeating them: the explicit form and the blockwise one.

The explicit form returns its probabilities, so in decode the statistics of a policy are a
by-product. The blockwise form never holds more than one block of queries against the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

QUERY_BLOCK = 512
"""Queries whose scores or mask may stand in memory at once."""

Visible = Callable[[int, int], torch.Tensor]
"""From a range of queries to the mask `[B, P, Q, T]` of keys they see, B and P broadcasting."""


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """How a model turns a query and a key into a score."""

    scaling: float
    """Factor on the product."""
    softcap: float | None = None
    """Bound on the scores by `tanh`, before the mask (Gemma 2)."""
    sinks: torch.Tensor | None = None
    """Learned logit of attending to nothing, one a query head `[H]` (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused kernel can do it."""
        return self.softcap is None and self.sinks is None

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores within their bound, if there is one."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def of_heads(self, heads: torch.Tensor) -> Scoring:
        """The same for some of the query heads, `[N]` indices."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[heads])


def attention_probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    scoring: Scoring,
    *,
    visible: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Softmax over the keys, in float32.

    Args:
        query: `[B, H, Q, D]`.
        key: `[B, G, T, D]`, H a multiple of G.
        scoring: How scores are made.
        visible: Boolean mask `[B, P, Q, T]`, P = G or 1, B broadcasting; all keys without it.
        causal: Whether the newest Q keys are the queries' own, in order, and hidden from older
            queries; all other keys are seen.

    Returns:
        Probabilities `[B, G, H/G, Q, T]`.
    """
    batch, heads, queries, width = query.shape
    groups, total = key.shape[1], key.shape[2]
    repeats = heads // groups
    packed = (query * scoring.scaling).reshape(batch, groups, repeats * queries, width)
    scores = torch.matmul(packed, key.transpose(-1, -2)).float()
    scores = scores.view(batch, groups, repeats, queries, total)
    scores = scoring.capped(scores)
    if visible is not None:
        scores = scores.masked_fill(~visible.unsqueeze(2), torch.finfo(scores.dtype).min)
    if causal:
        newer = torch.ones(queries, queries, dtype=torch.bool, device=scores.device).triu_(1)
        scores[..., -queries:].masked_fill_(newer, torch.finfo(scores.dtype).min)
    if scoring.sinks is None:
        return torch.softmax(scores, dim=-1)
    extra = scoring.sinks.float().view(1, groups, repeats, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, extra], dim=-1), dim=-1)[..., :-1]


def weigh_values(probabilities: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention's output from its probabilities.

    Args:
        probabilities: `[B, G, H/G, Q, T]`.
        value: `[B, G, T, D]`.

    Returns:
        `[B, H, Q, D]` in the values' dtype.
    """
    batch, groups, repeats, queries, total = probabilities.shape
    packed = probabilities.reshape(batch, groups, repeats * queries, total).to(value.dtype)
    return torch.matmul(packed, value).view(batch, groups * repeats, queries, value.shape[-1])


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scaling: float
) -> torch.Tensor:
    """Plain causal self-attention of a whole prompt, by torch's fused kernel.

    Args:
        query: `[B, H, T, D]`.
        key: `[B, G, T, D]`.
        value: `[B, G, T, D]`.
        scaling: Factor on the scores.

    Returns:
        `[B, H, T, D]`.
    """
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def blockwise_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    visible: Visible,
    *,
    causal: bool,
) -> torch.Tensor:
    """Masked attention, one block of queries after the other.

    Args:
        query: `[B, H, Q, D]`.
        key: `[B, G, T, D]`, T at least Q.
        value: `[B, G, T, D]`.
        scoring: How scores are made.
        visible: Mask of a range of queries.
        causal: Whether no query sees a newer key; the newest Q keys are the queries' own, in
            order, and a block then reads no key past its last query.

    Returns:
        `[B, H, Q, D]`.
    """
    queries, past = query.shape[2], key.shape[2] - query.shape[2]
    blocks = []
    for start in range(0, queries, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, queries)
        reach = past + end if causal else key.shape[2]
        part, seen = query[:, :, start:end], visible(start, end)[..., :reach]
        near_key, near_value = key[:, :, :reach], value[:, :, :reach]
        if scoring.is_plain:
            blocks.append(_fused(part, near_key, near_value, seen, scaling=scoring.scaling))
        else:
            probabilities = attention_probabilities(part, near_key, scoring, visible=seen)
            blocks.append(weigh_values(probabilities, near_value))
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    *,
    scaling: float,
) -> torch.Tensor:
    """Torch's fused kernel, the query heads of a kv head packed beside each other as queries."""
    batch, heads, queries, width = query.shape
    groups = key.shape[1]
    repeats = heads // groups
    packed = query.reshape(batch, groups, repeats * queries, width)
    mask = visible.repeat(1, 1, repeats, 1) if repeats > 1 else visible
    output = torch.nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=mask, scale=scaling
    )
    return output.reshape(batch, heads, queries, value.shape[-1])
