"""What a cache at two resolutions has to say of itself, beyond tokens and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvfold.artifacts import format_bytes
from kvfold.cache import CacheLayer
from kvfold.zoom.layer import ZoomLayer


@dataclass(frozen=True, slots=True)
class ZoomReport:
    """Tokens by resolution, and what moved between the tiers.

    Tokens and spans are those of a row, their mean over the rows of a batch; all layers hold the
    same. What was moved and the largest bytes count from when the cache was made, or was read from
    its file; they are left out where two reports are compared.
    """

    anchors: float
    """Exact tokens that stay: anchors, the first tokens, and runs too short for a span."""
    window: float
    """Exact tokens that are not divided yet, the newest."""
    spans: float
    """Spans."""
    span_tokens: float
    """Tokens of a span, the mean."""
    rank: float | None
    """Mean rank of the spans that are held in factors, over all layers; None where none is."""
    expanded: list[int]
    """Spans that a kv head expands for a query, one number a layer."""
    expanded_share: list[float]
    """Their share of all spans of the row that has most, one number a layer."""
    bytes_moved: int = field(compare=False)
    """Keys and values that were brought from the slow tier to the fast one, in all layers."""
    bytes_prompt: int = field(compare=False)
    """Largest fast bytes before there were spans: a prompt that is read at once stands whole until
    its forward is over."""
    bytes_peak: int = field(compare=False)
    """Largest fast bytes since: new tokens that are not folded yet, and all that the queries of a
    later prompt expand at once, included."""
    seconds: dict[str, float] = field(compare=False)
    """What folding took so far, by part: surprisal, segmentation, and making spans."""

    def __str__(self) -> str:
        """One line for a person."""
        rank = "" if self.rank is None else f" at rank {self.rank:.1f}"
        least, most = min(self.expanded), max(self.expanded)
        expanded = f"{most}" if least == most else f"{least} to {most}"
        return (
            f"{self.anchors:.0f} exact tokens, {self.window:.0f} newest, {self.spans:.0f} spans "
            f"of {self.span_tokens:.1f} tokens{rank}; a query expands {expanded} "
            f"({max(self.expanded_share):.1%}); {format_bytes(self.bytes_moved)} moved; "
            f"at most {format_bytes(self.bytes_peak or self.bytes_prompt)} fast"
        )


def zoom_report(parts: Sequence[CacheLayer], seconds: dict[str, float]) -> ZoomReport | None:
    """Count what the layers of a cache hold; None when none of them zooms.

    Args:
        parts: The layers.
        seconds: What folding took so far, by part.
    """
    layers = [part for part in parts if isinstance(part, ZoomLayer)]
    if not layers:
        return None
    anchors, window = exact_tokens(layers[0])
    for layer in layers:
        layer.note_peak()
    lengths = layers[0].spans.lengths if not layers[0].spans.is_empty else torch.zeros(1, 0)
    spans = int((lengths > 0).sum())
    return ZoomReport(
        anchors=float(anchors.float().mean()),
        window=float(window.float().mean()),
        spans=spans / len(lengths),
        span_tokens=int(lengths.sum()) / spans if spans else 0.0,
        rank=_rank(layers),
        expanded=[layer.expanded for layer in layers],
        expanded_share=[layer.expanded / max(len(layer.spans), 1) for layer in layers],
        bytes_moved=sum(layer.spans.bytes_moved for layer in layers),
        bytes_prompt=sum(layer.peaks[0] for layer in layers),
        bytes_peak=sum(layer.peaks[1] for layer in layers)
        + max(layer.peak_brought for layer in layers),
        seconds=seconds,
    )


def exact_tokens(layer: ZoomLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact tokens of each row that stay, and those that are not divided yet, `[B]` each."""
    positions = layer.slots.positions[:, 0]
    settled = positions.new_zeros(len(positions)) if layer.settled is None else layer.settled
    stays = (positions >= 0) & (positions < settled[:, None])
    return stays.sum(1), (positions >= settled[:, None]).sum(1)


def _rank(layers: Sequence[ZoomLayer]) -> float | None:
    """The mean over the layers whose slow tier holds any factors."""
    ranks = [layer.spans.slow.mean_rank for layer in layers]
    known = [rank for rank in ranks if rank is not None]
    return sum(known) / len(known) if known else None
