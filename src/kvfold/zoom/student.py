"""Decoding with spans at two resolutions, so that gates can learn from it.

SeKV (arXiv 2606.31145). The student hears sampled positions of a text that a teacher has read:
every token of it, its own key and value exact, attends to the text as a cache would hold it, with
spans that end before its window at two resolutions and everything else before it exact. So it sees
nothing of what comes after it, and says what decoding with such a cache would say.

Decisions are hard in the forward pass. Backwards, a gate g with threshold tau is worth
`sigmoid((g - tau) / 0.1)`, and a rank gate itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvfold.attention import LazyMask, Scoring, hand_over, require_attached
from kvfold.cache import CACHE_KEYWORD, CacheLayer
from kvfold.models import frozen
from kvfold.zoom.gates import Gates
from kvfold.zoom.judge import Choices, judge, left_out
from kvfold.zoom.student_attention import (
    ExactTokens,
    SpanTokens,
    straight_through,
    student_attention,
)
from kvfold.zoom.teacher import ReadLayer, ReadText, Teacher

_SOFTNESS = 0.1
"""Of a gate's decision, backwards (paper)."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """Sampled positions of a text, and what the teacher does there."""

    text: ReadText
    """The whole text."""
    positions: torch.Tensor
    """Of the queries, in order, `[Q]`."""
    seen: torch.Tensor
    """Which spans each query sees, `[Q, S]`."""
    logits: torch.Tensor
    """The teacher's, `[Q, V]`."""
    masses: list[torch.Tensor]
    """The teacher's attention to each span seen, in each layer that zooms, `[1, G, H/G, Q, S]`."""

    @classmethod
    @torch.no_grad()
    def make(cls, teacher: Teacher, text: ReadText, positions: torch.Tensor) -> Lesson:
        """Ask the teacher at some positions `[Q]`, in order."""
        seen = text.division.seen(positions, teacher.dividing.window)
        masses = [
            text.span_mass(layer, positions) * seen
            for layer in text.layers
            if layer.spans is not None
        ]
        logits = teacher.readout.logits(text.hidden[positions])
        return cls(text, positions, seen, logits, masses)


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """What the student said, and what it chose; the mean over layers."""

    logits: torch.Tensor
    """`[Q, V]`."""
    choices: Choices
    """Of the gates."""
    recon: torch.Tensor
    """Loss of the rank gates: share of the squared singular values that is left out."""
    ranks: torch.Tensor
    """Share of the singular values that is used."""


def hear(model: PreTrainedModel, gates: Gates, lesson: Lesson) -> Heard:
    """Let the student hear a lesson.

    Args:
        model: The attached model; its weights are constants.
        gates: What learns.
        lesson: Of a text that this model has read.

    Returns:
        What it said, with a graph to the gates.

    Raises:
        ConfigError: When the model is no longer attached.
    """
    require_attached(model)
    layers = [StudentLayer(layer, gates, lesson) for layer in lesson.text.layers]
    with frozen(model):
        output = model(
            input_ids=lesson.text.ids[lesson.positions][None],
            position_ids=lesson.positions[None],
            use_cache=True,
            **{CACHE_KEYWORD: Cache(layers=list(layers))},
        )
    zooming = [layer for layer in layers if layer.choices is not None]
    return Heard(
        output.logits[0],
        Choices(*_mean([_scalars(layer.choices) for layer in zooming])),
        *_mean([layer.factored for layer in zooming]),
    )


class StudentLayer(CacheLayer):
    """One layer of a text as a cache would hold it; new tokens see it and themselves."""

    def __init__(self, read: ReadLayer, gates: Gates, lesson: Lesson) -> None:
        """Hold what a layer has read.

        Args:
            read: The layer.
            gates: What decides.
            lesson: Whose positions are the queries.
        """
        super().__init__()
        self._read, self._gates, self._lesson = read, gates, lesson
        self._own: tuple[torch.Tensor, torch.Tensor] | None = None
        self.choices: Choices | None = None
        """Of the gates; None for a layer that does not zoom."""
        self.factored: tuple[torch.Tensor, torch.Tensor] = (torch.zeros(()), torch.zeros(()))
        """Loss of the rank gates, and share of the singular values that is used."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the queries' own keys and values, `[1, G, Q, D]`, with their graph."""
        self._own = key_states, value_states
        hand_over(self, key_states, kwargs)
        return key_states, value_states

    def attend(
        self, query: torch.Tensor, mask: LazyMask | torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Attention of the sampled queries, `[1, H, Q, D]`."""
        assert self._own is not None, "their keys came first"
        read, lesson, dtype = self._read, self._lesson, query.dtype
        keys, values = self._own[0].float(), self._own[1].float()
        query = (query.float() * scoring.scaling).unflatten(1, (keys.shape[1], -1))
        visible = self._visible_before()
        spans = None
        if read.spans is not None:
            spans = self._decide(query)
            in_span = torch.nn.functional.pad(lesson.seen, (0, 1))[:, lesson.text.division.span_of]
            visible = visible & ~in_span
        exact = ExactTokens(read.keys.float(), read.values.float(), visible, keys, values)
        output = student_attention(query, exact, spans, scoring)
        return output.flatten(1, 2).to(dtype)

    def _visible_before(self) -> torch.Tensor:
        """Which earlier tokens each query sees by the model's own rule, `[Q, T]`."""
        positions = self._lesson.positions
        places = torch.arange(self._read.keys.shape[2], device=positions.device)
        seen = self._read.mask.visible(places[None, None], positions[None])[0, 0]
        return seen & (places < positions[:, None])

    def _decide(self, query: torch.Tensor) -> SpanTokens:
        """Ask the gates, and note how well they chose."""
        spans, gates, lesson = self._read.spans, self._gates, self._lesson
        assert spans is not None
        division = lesson.text.division
        lengths = division.lengths[None]
        norms = gates.norms(spans.number, spans.means)
        logits = gates.logits(spans.number, query, spans.means, norms, lengths)
        thresholds = gates.thresholds[spans.number].view(*query.shape[1:3], 1, 1)
        limits = gates.thresholds_of(spans.number).view_as(thresholds)
        soft = torch.sigmoid((logits.sigmoid() - thresholds) / _SOFTNESS)
        expand = straight_through(logits > limits, soft)
        self.choices = judge(logits, expand, lesson.masses[spans.number], lesson.seen)
        singular = spans.keys.singular, spans.values.singular
        ranks = (
            gates.key_ranks(singular[0], spans.means),
            gates.value_ranks(singular[1], spans.means),
        )
        self.factored = (
            torch.stack([left_out(m, s) for m, s in zip(ranks, singular, strict=True)]).mean(),
            torch.stack([each.mean() for each in ranks]).mean(),
        )
        used = [straight_through(each > 0.5, each) for each in ranks]
        return SpanTokens(
            spans.means,
            spans.value_means,
            spans.rebuild_keys(used[0]),
            spans.values.rebuild(used[1]),
            division,
            lesson.seen,
            expand,
        )


def _scalars(choices: Choices | None) -> tuple[torch.Tensor, ...]:
    assert choices is not None
    return choices.zoom, choices.expanded, choices.recall, choices.caught


def _mean(rows: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    return [torch.stack(column).mean() for column in zip(*rows, strict=True)]
