"""A batch of prompts, read once for all caches.

Until what is read at once is whole, every method computes what the full cache computes: evicting
begins when a layer, or the whole forward, is done. So the model reads a batch once, and the layers
of every other cache are told the same queries, keys and values. Questions may come later, in a
forward of their own that each cache answers from what it has kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from kvfold.bench.rounds import seconds_now
from kvfold.cache import KVCache, prefill
from kvfold.cache.replay import RecordingCache, replay
from kvfold.evaluation.batch_decoding import left_padded
from kvfold.evaluation.metering import MeteredDecoder


class PromptBatch:
    """A batch of prompts that the full cache has read."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        *,
        pad: int,
        question: int = 0,
    ) -> None:
        """Read the prompts, shorter ones padded on the left.

        Args:
            model: An attached model.
            prompts: B of them.
            pad: The token to pad with.
            question: Last tokens of every prompt, fewer than it has, that each cache reads later,
                in a forward of their own.
        """
        tokens, mask = left_padded(prompts, pad, model.device)
        width = tokens.shape[1]
        self._tokens, self._question = tokens.split([width - question, question], dim=1)
        self._mask = None if mask is None else mask[:, : width - question]
        self._model = model
        self._full = RecordingCache(model)
        begin = seconds_now(model.device)
        self._logits = self._read(self._full)
        self._seconds = seconds_now(model.device) - begin

    def decoder(self) -> MeteredDecoder:
        """The full cache itself, after the prompts; to be taken once."""
        return self._ask(self._full, self._logits, self._seconds)

    def tell(self, cache: KVCache) -> MeteredDecoder:
        """Let another cache hold the prompts.

        Args:
            cache: Empty, made for the same model.
        """
        begin = seconds_now(self._model.device)
        if len(cache.own_layers) < len(cache.layers):
            # Layers that are transformers' own cannot be told: the model reads once more.
            logits, shared = self._read(cache), 0.0
        else:
            replay(self._full, cache)
            logits, shared = self._logits, self._seconds
        spent = seconds_now(self._model.device) - begin
        return self._ask(cache, logits, shared + spent)

    def _read(self, cache: KVCache) -> torch.Tensor:
        """Run what comes before the questions into a cache."""
        return prefill(self._model, self._tokens, cache, attention_mask=self._mask)

    def _ask(self, cache: KVCache, logits: torch.Tensor, seconds: float) -> MeteredDecoder:
        """Let a cache that holds the rest, after so many seconds, read the questions."""
        decoder = MeteredDecoder(self._model, cache, logits, self._mask, seconds=seconds)
        if self._question.shape[1] > 0:
            decoder.ask(self._question)
        return decoder
