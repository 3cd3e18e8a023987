"""What a cache takes in time and memory while it is evaluated: by the way, not a benchmark.

Other caches stand beside it, nothing is repeated, and whatever else runs on the machine is on the
clock, too. Speed and memory are measured by `kvfold bench`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvfold.bench.rounds import seconds_now
from kvfold.cache import KVCache
from kvfold.evaluation.batch_decoding import BatchDecoder


@dataclass(frozen=True, slots=True)
class Metered:
    """What one cache took for one batch."""

    rows: int
    """Of the batch."""
    first_token_seconds: float
    """To read the prompts, to fill the cache and to read the questions, if these come later. A
    prompt that was read once for several caches counts in full for each."""
    tokens_per_second: float | None
    """Of all rows together, while tokens were decoded; None where none was."""
    bytes_peak: int
    """Most bytes that the cache held after a forward, of both tiers, a row."""


class MeteredDecoder(BatchDecoder):
    """A cache with a batch of prompts in it, and what it has taken so far."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        logits: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        seconds: float,
    ) -> None:
        """Take over a cache.

        Args:
            model: An attached model.
            cache: Holds the prompts.
            logits: After them, `[B, V]`.
            mask: 1 for tokens and 0 for padding, `[B, T]`; None where there is no padding.
            seconds: That it took so far.
        """
        super().__init__(model, cache, logits, mask)
        self._rows = len(logits)
        self._first_token_seconds = seconds
        self._decode_seconds, self._decoded = 0.0, 0
        self._bytes_peak = cache.bytes_held

    def ask(self, tokens: torch.Tensor) -> None:
        """Read questions `[B, N]` before the first token."""
        self._first_token_seconds += self._timed(tokens)

    def feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Add a token `[B]` to each row, and give the logits `[B, V]` of what follows."""
        self._decode_seconds += self._timed(tokens[:, None])
        self._decoded += len(tokens)
        return self.logits

    def metered(self) -> Metered:
        """What was taken up to now."""
        return Metered(
            rows=self._rows,
            first_token_seconds=self._first_token_seconds,
            tokens_per_second=self._decoded / self._decode_seconds if self._decoded else None,
            bytes_peak=self._bytes_peak // self._rows,
        )

    def _timed(self, tokens: torch.Tensor) -> float:
        begin = seconds_now(tokens.device)
        self.read(tokens)
        spent = seconds_now(tokens.device) - begin
        self._bytes_peak = max(self._bytes_peak, self.cache.bytes_held)
        return spent
