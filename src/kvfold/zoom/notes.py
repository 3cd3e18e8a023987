"""What a cache at two resolutions does with a text, noted as it does it; only where one asks."""

from __future__ import annotations

from collections.abc import Callable

import torch


class TextNotes:
    """How surprising the tokens of a prompt were, and which became anchors."""

    def __init__(self) -> None:
        """Nothing was read yet."""
        self._nats: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._anchors: list[torch.Tensor] = []

    def note_surprisal(self, positions: torch.Tensor, nats: torch.Tensor) -> None:
        """Of the tokens of one forward.

        Args:
            positions: Logical ones, `[B, N]`; negative for padding.
            nats: `[B, N]`.
        """
        self._nats.append((positions.clone(), nats))

    def note_anchors(self, positions: torch.Tensor) -> None:
        """Of one fold: logical positions, `[B, N]`; negative for other tokens."""
        self._anchors.append(positions)

    def surprisal(self, row: int, count: int) -> torch.Tensor:
        """Nats of the first tokens of a row, `[count]`; 0 where it is not known."""
        found = torch.zeros(count)
        for positions, nats in self._nats:
            known = (positions[row] >= 0) & (positions[row] < count)
            found[positions[row][known].cpu().long()] = nats[row][known].float().cpu()
        return found

    def anchors(self, row: int, count: int) -> torch.Tensor:
        """Whether each of the first tokens of a row is an anchor, `[count]`."""
        found = torch.zeros(count, dtype=torch.bool)
        for positions in self._anchors:
            known = (positions[row] >= 0) & (positions[row] < count)
            found[positions[row][known].cpu().long()] = True
        return found


class Tally:
    """How often the spans of one layer are expanded."""

    def __init__(self) -> None:
        """Start to count."""
        self._counts: torch.Tensor | None = None
        self._queries = 0

    def add(self, chosen: torch.Tensor, asked: torch.Tensor | None, spans: int) -> None:
        """Count what queries expanded.

        Args:
            chosen: Spans, `[B, G, Q, E]`.
            asked: Whether a head reads them, `[B, G, H/G, Q, E]`; all do without it.
            spans: S, of the row that has most.
        """
        counts = chosen.new_zeros(len(chosen), spans)
        is_read = torch.ones_like(chosen) if asked is None else asked.any(2).to(chosen.dtype)
        counts.scatter_add_(1, chosen.flatten(1), is_read.flatten(1))
        if self._counts is not None:
            counts[:, : self._counts.shape[1]] += self._counts
        self._counts = counts
        self._queries += chosen.shape[1] * chosen.shape[2]

    def shares(self, spans: int) -> torch.Tensor:
        """Share of queries and kv heads that expanded each span.

        Args:
            spans: S, of the row that has most.

        Returns:
            `[B, S]`, on the CPU; zeros of one row before the first query.
        """
        if self._counts is None:
            return torch.zeros(1, spans)
        shares = self._counts.cpu().float() / max(self._queries, 1)
        return torch.nn.functional.pad(shares, (0, spans - shares.shape[1]))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension."""
        self._counts = None if self._counts is None else change(self._counts)
