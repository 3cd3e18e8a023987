"""How well gates choose spans, and rank gates singular values (SeKV, arXiv 2606.31145)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_COVERED = 0.9
"""Share of a head's attention to spans that its query should expand (paper)."""
_POSITIVE = 10.0
"""Weight of a span that should be expanded among those that need not (paper)."""


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """What the gates of one layer chose, and how well; scalars, means over heads and queries."""

    zoom: torch.Tensor
    """Loss of the gates: cross-entropy with the spans that cover the teacher's attention."""
    expanded: torch.Tensor
    """Share of the spans seen that were expanded."""
    recall: torch.Tensor
    """Share of the spans to be expanded that were."""
    caught: torch.Tensor
    """Share of the teacher's attention to spans that is on the tenth of them with the highest
    gates."""


def left_out(ranks: torch.Tensor, singular: torch.Tensor) -> torch.Tensor:
    """Mean over spans of `sum (1 - m)^2 s^2 / sum s^2`, with both `[1, G, S, R]`."""
    squares = singular.square()
    total = squares.sum(-1).clamp_min(torch.finfo(squares.dtype).tiny)
    return (((1 - ranks).square() * squares).sum(-1) / total).mean()


def wanted(masses: torch.Tensor) -> torch.Tensor:
    """The fewest spans that cover nine tenths of the attention to all, `[..., S]`.

    Args:
        masses: Attention to each span, 0 where it is not seen, `[..., S]`.
    """
    ordered, order = masses.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    among = (before < _COVERED * ordered.sum(-1, keepdim=True)) & (ordered > 0)
    return torch.zeros_like(among).scatter(-1, order, among)


def judge(
    logits: torch.Tensor, expand: torch.Tensor, masses: torch.Tensor, seen: torch.Tensor
) -> Choices:
    """How well the gates of a layer chose.

    Args:
        logits: Of the gates, `[1, G, H/G, Q, S]`.
        expand: What they chose, likewise.
        masses: The teacher's attention to each span seen, likewise.
        seen: Which spans each query sees, `[Q, S]`.
    """
    target, count = wanted(masses), (seen.sum() * logits[..., 0, 0].numel()).clamp_min(1)
    weight = torch.tensor(_POSITIVE, device=logits.device)
    each = torch.nn.functional.binary_cross_entropy_with_logits(
        logits, target.to(logits.dtype), pos_weight=weight, reduction="none"
    )
    found = (expand.detach() * target).sum() / target.sum().clamp_min(1)
    return Choices(
        zoom=(each * seen).sum() / count,
        expanded=(expand * seen).sum() / count,
        recall=found,
        caught=_caught(logits.detach(), masses, seen),
    )


def _caught(logits: torch.Tensor, masses: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Share of the attention to spans that is on the tenth of them with the highest gates."""
    ranked = logits.masked_fill(~seen, -torch.inf).argsort(dim=-1, descending=True)
    allowed = (seen.sum(-1, keepdim=True) / 10).ceil()
    first = torch.arange(seen.shape[-1], device=seen.device) < allowed
    best = (masses.gather(-1, ranked) * first).sum(-1)
    return (best / masses.sum(-1).clamp_min(torch.finfo(masses.dtype).tiny)).mean()
