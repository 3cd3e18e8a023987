"""A batch of prompts, read once for all caches, and decoded together a token a row at a time.

Until the prompt is whole, every method computes what the full cache computes: evicting begins when
a layer, or the whole forward, is done. So the model reads a batch once, and the layers of every
other cache are told the same queries, keys and values.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvfold.api import make_cache
from kvfold.cache import KVCache, prefill
from kvfold.cache.replay import RecordingLayer, replay


class BatchDecoder:
    """A cache with a batch of prompts in it.

    Attributes:
        cache: Holds the prompts and what was fed since.
        logits: After the last token of each row, `[B, V]`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        logits: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        """Take over a cache.

        Args:
            model: An attached model.
            cache: Holds the prompts.
            logits: After them, `[B, V]`.
            mask: 1 for tokens and 0 for padding, `[B, T]`; None where there is no padding.
        """
        self._model, self._mask = model, mask
        self.cache, self.logits = cache, logits

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Add a token to each row.

        Args:
            tokens: `[B]`.

        Returns:
            Logits of what follows, `[B, V]`.
        """
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        self.logits = prefill(self._model, tokens[:, None], self.cache, attention_mask=self._mask)
        return self.logits

    def fork(self) -> BatchDecoder:
        """An independent copy."""
        other = copy.copy(self)
        other.cache = self.cache.fork()
        return other

    def select(self, rows: Sequence[int]) -> None:
        """Keep some rows."""
        indices = torch.tensor(rows, device=self.logits.device)
        self.cache.batch_select_indices(indices)
        self.logits = self.logits[indices]
        self._mask = None if self._mask is None else self._mask[indices]


class PromptBatch:
    """A batch of prompts that the full cache has read."""

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, pad: int
    ) -> None:
        """Read the prompts, shorter ones padded on the left.

        Args:
            model: An attached model.
            prompts: B of them.
            pad: The token to pad with.
        """
        width = max(map(len, prompts))
        rows = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
        self._tokens = torch.tensor(rows, device=model.device)
        mask = torch.arange(width, device=model.device) >= width - lengths[:, None]
        self._mask = None if bool(mask.all()) else mask.long()
        self._model = model
        self._full = KVCache(model, make_cache(model, "full").spec, RecordingLayer)
        self._logits = prefill(model, self._tokens, self._full, attention_mask=self._mask)

    def decoder(self) -> BatchDecoder:
        """The full cache itself, after the prompts; to be taken once."""
        return BatchDecoder(self._model, self._full, self._logits, self._mask)

    def tell(self, cache: KVCache) -> BatchDecoder:
        """Let another cache hold the prompts.

        Args:
            cache: Empty, made for the same model.
        """
        if len(cache.own_layers) < len(cache.layers):
            # Layers that are transformers' own cannot be told: the model reads once more.
            prefill(self._model, self._tokens, cache, attention_mask=self._mask)
            return BatchDecoder(self._model, cache, self._logits, self._mask)
        replay(self._full, cache)
        return BatchDecoder(self._model, cache, self._logits, self._mask)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one row says."""

    tokens: list[int]
    """Without the one that ends it."""
    is_cut: bool
    """Whether it stopped at the most tokens allowed."""


def answer_greedily(
    decoder: BatchDecoder, *, limit: int, stop: frozenset[int]
) -> tuple[list[Answer], list[torch.Tensor]]:
    """Let every row say what it finds likeliest, until all have come to their end.

    Args:
        decoder: Holds the prompts; it is used up.
        limit: Most tokens of an answer.
        stop: Tokens that end one.

    Returns:
        The answers, and the logits `[B, V]` after each of the tokens of the longest.
    """
    said: list[list[int]] = [[] for _ in decoder.logits]
    speaking, logits = set(range(len(said))), []
    for _ in range(limit):
        tokens = decoder.logits.argmax(dim=-1)
        for row, token in enumerate(tokens.tolist()):
            if row in speaking and token not in stop:
                said[row].append(token)
            else:
                speaking.discard(row)
        if not speaking:
            break
        logits.append(decoder.feed(tokens))
    return [Answer(each, row in speaking) for row, each in enumerate(said)], logits
