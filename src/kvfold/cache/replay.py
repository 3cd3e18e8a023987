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
        count: Tokens that it is to hold: of a prompt without padding that is shorter, queries, keys
            and values are repeated as they are. Such a text was never read, but it is as large.

    Raises:
        ConfigError: When a padded prompt is to be repeated.
    """
    if count is not None and any(part.lengths is not None for part in source.parts):
        raise ConfigError("a prompt with padding cannot be repeated: give one without")
    for index, (recorded, layer) in enumerate(
        zip(source.own_layers, cache.own_layers, strict=True)
    ):
        assert isinstance(recorded, RecordingLayer), "the source is made of them"
        assert recorded.heard is not None, "it has read a prompt"
        query, mask, scoring = recorded.heard
        width = query.shape[2]
        keys, values = recorded.slots.keys[:, :, :width], recorded.slots.values[:, :, :width]
        if count is not None:
            query, keys, values = (_repeated(each, count, 2) for each in (query, keys, values))
            mask = None
        cache.update(keys.clone(), values.clone(), index)
        layer.witness(query, mask, scoring)
    cache.end_of_forward(_outcome(source.outcome, count))


def _outcome(outcome: Outcome | None, count: int | None) -> Outcome | None:
    if outcome is None or outcome.input_ids is None or count is None:
        return outcome
    return Outcome(_repeated(outcome.input_ids, count, 1), _repeated(outcome.hidden, count, 1))


def _repeated(tensor: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """The tensor over and over, and as much of it as makes the count."""
    times = -(-count // tensor.shape[dim])
    return torch.cat([tensor] * times, dim=dim).narrow(dim, 0, count)
