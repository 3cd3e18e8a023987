"""Gates before training: fitted to the queries and mean keys of some texts.

Not in the paper (SeKV, arXiv 2606.31145), whose 3000 steps start from random directions. A head's W
starts as the directions in which its queries and the mean keys of spans vary most, with one weak
row along the mean key, by which training can raise or lower all gates of a query. Its gain gives
the gates a common spread, and its threshold lets a given share of spans be expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvfold.zoom.gates import Gates
from kvfold.zoom.teacher import ReadText

_SPREAD = 1.0
"""Standard deviation of a head's gates before the sigmoid, before training."""
_WEAK = 0.3
"""Length of the row along the mean key; the others have 1."""
_TINY = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What one text tells of one layer."""

    query: torch.Tensor
    """Scaled queries, `[1, G, H/G, Q, D]`."""
    means: torch.Tensor
    """Mean keys of spans, `[1, G, S, D]`."""
    lengths: torch.Tensor
    """Tokens of each span, `[1, S]`."""
    seen: torch.Tensor
    """Which spans each query sees, `[Q, S]`."""


def sample_layers(text: ReadText, positions: torch.Tensor, window: int) -> list[Sample]:
    """What a text tells of each layer that zooms.

    Args:
        text: As it was read.
        positions: Of queries, `[Q]`.
        window: Tokens before each that are in no span it sees.
    """
    seen, lengths = text.division.seen(positions, window), text.division.lengths[None]
    samples = []
    for layer in text.layers:
        if layer.spans is not None:
            assert layer.query is not None, "it is asked before it is forgotten"
            query = layer.query[:, :, positions].float() * layer.scoring.scaling
            query = query.unflatten(1, (layer.keys.shape[1], -1))
            samples.append(Sample(query, layer.spans.means, lengths, seen))
    return samples


@torch.no_grad()
def fit_first(gates: Gates, texts: Sequence[list[Sample]], expanded: float) -> None:
    """Give gates their first directions, gains and thresholds.

    Args:
        gates: Changed in place.
        texts: Samples of every layer of each text.
        expanded: Share of the spans that a head expands, over all queries.
    """
    for layer in range(gates.shape.layers):
        samples = [text[layer] for text in texts]
        gates.route[layer] = _directions(samples, gates.shape.routing).flatten(0, 1)
        gates.gain[layer] = 1.0
        plain = torch.cat([_seen_logits(gates, layer, each, offset=False) for each in samples], -1)
        gates.gain[layer] = _SPREAD / plain.std(-1).clamp_min(_TINY)
        logits = torch.cat([_seen_logits(gates, layer, each, offset=True) for each in samples], -1)
        gates.thresholds[layer] = logits.quantile(1 - expanded, dim=-1).sigmoid()


def _directions(samples: list[Sample], count: int) -> torch.Tensor:
    """Rows of W for each head, `[G, H/G, P, D]`."""
    queries = torch.cat([each.query[0] for each in samples], dim=-2)
    means = torch.cat([each.means[0] for each in samples], dim=-2)
    center = means.mean(-2, keepdim=True)
    unit = torch.nn.functional.normalize(center, dim=-1)
    identity = torch.eye(means.shape[-1], device=means.device)
    across = identity - unit.mT @ unit
    keys = _relative(across @ _moment(means - center) @ across).unsqueeze(1)
    across = across.unsqueeze(1)
    asked = _relative(across @ _moment(queries) @ across)
    found = torch.linalg.eigh(keys + asked).eigenvectors.mT.flip(-2)
    rows = found[..., : count - 1, :]
    weak = _WEAK * unit.unsqueeze(1).expand(*rows.shape[:2], 1, -1)
    return torch.cat([rows, weak], dim=-2)


def _moment(vectors: torch.Tensor) -> torch.Tensor:
    return vectors.mT @ vectors / vectors.shape[-2]


def _relative(moment: torch.Tensor) -> torch.Tensor:
    """With a trace of 1."""
    trace = moment.diagonal(dim1=-2, dim2=-1).sum(-1)
    return moment / trace.clamp_min(_TINY)[..., None, None]


def _seen_logits(gates: Gates, layer: int, sample: Sample, *, offset: bool) -> torch.Tensor:
    """Gates of the spans that are seen, before the sigmoid, `[H, N]`; without `log |S|` or with."""
    norms = gates.norms(layer, sample.means)
    lengths = sample.lengths if offset else torch.ones_like(sample.lengths)
    logits = gates.logits(layer, sample.query, sample.means, norms, lengths)
    return logits[0].flatten(0, 1)[:, sample.seen]
