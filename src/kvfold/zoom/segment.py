"""Where a text is cut into anchors and spans (SeKV, arXiv 2606.31145).

Tokens that the model did not expect, `H_t > mean + a * deviation`, are anchors: they stay as they
are. The runs between two anchors become spans, which are held at two resolutions. Departures from
the paper: runs longer than `longest` are cut into even pieces and short ones stay raw, so that all
spans fit one buffer; the first tokens of a row are always anchors; a budget may allow fewer.

Everything is by row: rows of a batch have spans of their own. Surprisal is in nats, `[B, N]`; NaN
counts as 0, and infinite surprisal is above every threshold. Padding may stand anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold.errors import ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class Segmentation:
    """Which span of its row each token is in."""

    span_of: torch.Tensor
    """`[B, N]` int64, from 0 in order; -1 for what is in none: anchors, short runs, padding."""
    counts: torch.Tensor
    """Spans of each row, `[B]` int64."""


def anchor_threshold(
    surprisal: torch.Tensor, tokens: torch.Tensor, deviations: float = 1.0
) -> torch.Tensor:
    """The surprisal above which a token is an anchor: mean + deviations * population deviation.

    Args:
        surprisal: In nats, `[B, N]`.
        tokens: False for padding, `[B, N]`.
        deviations: The paper's `a`.

    Returns:
        Nats in float32, `[B]`, over the row's finite surprisals; infinite for a row of none.
    """
    # Not every device has float64, in which sums hardly depend on how the row is padded.
    values, counted = _clean(surprisal).cpu().double(), tokens.cpu()
    counted = counted & values.isfinite()
    count = counted.sum(-1)
    mean = values.where(counted, 0.0).sum(-1) / count.clamp_min(1)
    spread = (values - mean[:, None]).where(counted, 0.0).square().sum(-1) / count.clamp_min(1)
    thresholds = (mean + deviations * spread.sqrt()).where(count > 0, torch.inf)
    return thresholds.float().to(surprisal.device)


def anchors(
    surprisal: torch.Tensor,
    tokens: torch.Tensor,
    thresholds: torch.Tensor,
    *,
    sinks: int,
    most: int | None,
) -> torch.Tensor:
    """The tokens that stay as they are.

    Args:
        surprisal: In nats, `[B, N]`.
        tokens: False for padding, `[B, N]`.
        thresholds: Nats a token must exceed, `[B]`.
        sinks: First tokens of a row that are anchors whatever their surprisal.
        most: Anchors a row may have: the sinks first, then those of the highest surprisal, of
            equals the earlier. None: as many as there are.

    Returns:
        Boolean mask, `[B, N]`.

    Raises:
        ConfigError: When `sinks` or `most` is negative.

    Example:
        >>> surprisal = torch.tensor([[0.0, 1.0, 9.0, 1.0, 8.0]])
        >>> tokens = torch.ones(1, 5, dtype=torch.bool)
        >>> anchors(surprisal, tokens, torch.tensor([5.0]), sinks=1, most=2)
        tensor([[ True, False,  True, False, False]])
    """
    if sinks < 0 or (most is not None and most < 0):
        raise ConfigError(f"sinks {sinks} and most {most} were given: give numbers from 0 up")
    values = _clean(surprisal)
    first = sinks if most is None else min(sinks, most)
    is_sink = tokens & (tokens.cumsum(-1) <= first)
    above = tokens & ~is_sink & (values > thresholds[:, None].to(values.device))
    if most is not None:
        ranked = values.where(above, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        room = most - is_sink.sum(-1, keepdim=True)
        above &= ranked.argsort(dim=-1) < room
    return is_sink | above


def segment(
    anchors: torch.Tensor, tokens: torch.Tensor, *, shortest: int = 16, longest: int = 32
) -> Segmentation:
    """Turn the runs of tokens between anchors into spans.

    A run longer than `longest` is cut into as few pieces as can be, of lengths that differ by one
    at most: none has less than half of `longest`.

    Args:
        anchors: True for anchors, `[B, N]`.
        tokens: False for padding, `[B, N]`.
        shortest: Tokens of a run that becomes a span; a shorter one stays raw.
        longest: Tokens of a span at most.

    Returns:
        Which span each token is in.

    Raises:
        ConfigError: When `shortest` is not from 1 to `longest`.

    Example:
        >>> anchors = torch.tensor([[1, 0, 0, 0, 0, 0, 1, 0]]).bool()
        >>> segment(anchors, torch.ones_like(anchors), shortest=2, longest=3).span_of
        tensor([[-1,  0,  0,  0,  1,  1, -1, -1]])
    """
    if not 1 <= shortest <= longest:
        raise ConfigError(
            f"spans of {shortest} to {longest} tokens were asked for: give a `shortest` from 1 to "
            "`longest`"
        )
    free = tokens & ~anchors
    starts = free & ~_shifted(free)
    place = _place(starts)
    run = (starts.cumsum(-1) - 1).clamp_min(0)
    lengths = torch.zeros_like(run).scatter_add_(-1, run, free.long()).gather(-1, run)
    pieces = (lengths + longest - 1) // longest
    # Piece of the run's token p: floor(p * pieces / length), a step every length / pieces tokens.
    piece, last = place * pieces, (place - 1) * pieces
    divisor = lengths.clamp_min(1)
    begins = (place == 0) | (piece // divisor != last // divisor)
    inside = free & (lengths >= shortest)
    begins &= inside
    return Segmentation((begins.cumsum(-1) - 1).where(inside, -1), begins.sum(-1))


def _clean(surprisal: torch.Tensor) -> torch.Tensor:
    """No NaN and nothing negative."""
    return surprisal.nan_to_num(nan=0.0, posinf=torch.inf, neginf=0.0).clamp_min(0)


def _shifted(values: torch.Tensor) -> torch.Tensor:
    """The flag of the token before, `[B, N]`; false for the first."""
    shifted = values.roll(1, dims=-1)
    shifted[:, :1] = False
    return shifted


def _place(starts: torch.Tensor) -> torch.Tensor:
    """How many tokens after the last start each token stands, `[B, N]`."""
    indices = torch.arange(starts.shape[-1], device=starts.device).expand(starts.shape)
    return indices - indices.where(starts, 0).cummax(-1).values
