"""Telling one cache what another has heard, without running the model again."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvfold.attention import LazyMask, Scoring
from kvfold.cache.cache import CacheSpec, KVCache, Outcome
from kvfold.cache.layer import CacheLayer
from kvfold.errors import ConfigError

Heard = tuple[torch.Tensor, LazyMask | torch.Tensor | None, Scoring]


class RecordingLayer(CacheLayer):
    """Keeps every token, and what its first forward was asked."""

    heard: Heard | None = None

    def attend(
        self, query: torch.Tensor, mask: LazyMask | torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Attention as ever; the first arguments are noted."""
        if self.heard is None:
            self.heard = (query, mask, scoring)
        return super().attend(query, mask, scoring)


class RecordingCache(KVCache):
    """Keeps every token, what its first forward was asked, and what came of it."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Start empty.

        Args:
            model: An attached model.
        """
        super().__init__(model, CacheSpec("full"), RecordingLayer)
        self.outcome: Outcome | None = None

    def end_of_forward(self, outcome: Outcome | None = None) -> None:
        """Note what the first forward gave."""
        self.outcome = outcome if self.outcome is None else self.outcome
        super().end_of_forward(outcome)


def replay(source: RecordingCache, cache: KVCache, *, count: int | None = None) -> None:
    """Let a cache hold the prompt that another one was given in its first forward.

    Args:
        source: Later tokens are left out.
        cache: Empty, made for the same model; all its layers are kvfold's.
        count: Tokens that it is to hold: a prompt without padding comes over and over, like the
            chunks of a longer one, with queries, keys and values as they are, and as much of it as
            makes the count. Such a text was never read, but it is as large.

    Raises:
        ConfigError: When a padded prompt is to be repeated.
    """
    if count is not None and any(part.lengths is not None for part in source.parts):
        raise ConfigError("a prompt with padding cannot be repeated: give one without")
    width = _recorded(source.own_layers[0])[1][0].shape[2]
    pieces = [width] if count is None else [width] * (count // width)
    if count is not None and count % width:
        pieces.append(count % width)
    for piece in pieces:
        _replay_piece(source, cache, piece, is_prompt=count is None)


def _replay_piece(source: RecordingCache, cache: KVCache, count: int, *, is_prompt: bool) -> None:
    """Let a cache hold the first tokens of what was read, behind what it holds."""
    for index, (recorded, layer) in enumerate(
        zip(source.own_layers, cache.own_layers, strict=True)
    ):
        told, (query, mask, scoring) = _recorded(recorded)
        held = told.slots
        cache.update(held.keys[:, :, :count].clone(), held.values[:, :, :count].clone(), index)
        layer.witness(query[:, :, :count], mask if is_prompt else None, scoring)
    outcome = source.outcome
    if outcome is not None and outcome.input_ids is not None and count < outcome.hidden.shape[1]:
        outcome = Outcome(outcome.input_ids[:, :count], outcome.hidden[:, :count])
    cache.end_of_forward(outcome)


def _recorded(layer: object) -> tuple[RecordingLayer, Heard]:
    assert isinstance(layer, RecordingLayer), "the source is made of them"
    assert layer.heard is not None, "it has read a prompt"
    return layer, layer.heard
