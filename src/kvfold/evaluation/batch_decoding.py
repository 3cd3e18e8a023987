"""Rows that are decoded together, a token a row at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvfold.cache import KVCache, prefill


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
        return self.read(tokens[:, None])

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Add tokens to each row, in one forward.

        Args:
            tokens: `[B, N]`, no padding among them.

        Returns:
            Logits of what follows, `[B, V]`.
        """
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(tokens.shape)], dim=1)
        self.logits = prefill(self._model, tokens, self.cache, attention_mask=self._mask)
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


def left_padded(
    prompts: Sequence[Sequence[int]], pad: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts side by side, `[B, N]`, shorter ones padded on the left.

    Args:
        prompts: B of them.
        pad: The token to pad with.
        device: Where to.

    Returns:
        Tokens, and 1 for tokens and 0 for padding; None where there is no padding.
    """
    width = max(map(len, prompts))
    rows = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
    return torch.tensor(rows, device=device), None if bool(mask.all()) else mask


@dataclass(frozen=True, slots=True)
class Answer:
    """What one row says."""

    tokens: list[int]
    """Without the one that ends it."""
    is_cut: bool
    """Whether it stopped at the most tokens allowed."""


def answer_greedily(
    decoder: BatchDecoder,
    *,
    limit: int,
    stop: frozenset[int],
    is_done: Callable[[Sequence[int]], bool] = lambda tokens: False,
) -> tuple[list[Answer], list[torch.Tensor]]:
    """Let every row say what it finds likeliest, until all have come to their end.

    Args:
        decoder: Holds the prompts; it is used up.
        limit: Most tokens of an answer.
        stop: Tokens that end one, and are no part of it.
        is_done: Whether an answer, as it is so far, has come to its end.

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
        speaking -= {row for row in speaking if is_done(said[row])}
    return [Answer(each, row in speaking) for row, each in enumerate(said)], logits
