"""The slow tier: the keys and values of the tokens of all spans of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvfold.zoom.growing import Growing


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Spans to be brought to the fast tier, `[N]` each."""

    rows: torch.Tensor
    """Row of the batch."""
    heads: torch.Tensor
    """Kv head."""
    spans: torch.Tensor
    """Number of the span in its row."""
    starts: torch.Tensor
    """Its first token among those of its row's spans."""
    lengths: torch.Tensor
    """Its tokens."""


class RawTier:
    """Keys and values as they are; those of one token next to each other."""

    def __init__(self, longest: int) -> None:
        """Start empty.

        Args:
            longest: L, tokens of the longest span.
        """
        self.longest = longest
        self._held = Growing({"tokens": 2, "positions": 2})
        self._key_width = 0

    def __len__(self) -> int:
        """Tokens of the spans of the row that has most, empty places among them included."""
        return len(self._held)

    @property
    def width(self) -> int:
        """2D, numbers of a token's key and value."""
        return self._held["tokens"].shape[-1]

    @property
    def keys(self) -> torch.Tensor:
        """`[B, G, T, D]`, a view."""
        return self._held["tokens"][..., : self._key_width]

    @property
    def values(self) -> torch.Tensor:
        """`[B, G, T, D]`, a view."""
        return self._held["tokens"][..., self._key_width :]

    @property
    def positions(self) -> torch.Tensor:
        """Logical positions, `[B, 1, T]`; negative where a row has no token."""
        return self._held["positions"]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return self._held.nbytes

    def add(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
        """Append the tokens of new spans.

        Args:
            keys: `[B, G, N, D]`, rotated.
            values: `[B, G, N, D]`.
            positions: Logical ones, `[B, N]`; negative where a row has fewer.
        """
        self._key_width = keys.shape[-1]
        tokens = torch.cat([keys, values], dim=-1)
        self._held.append({"tokens": tokens, "positions": positions[:, None].int()})

    def fetch(self, wanted: Wanted) -> torch.Tensor:
        """Keys and values of spans, `[N, L, 2D]`; anything after a span's last token."""
        tokens = self._held.whole("tokens")
        groups, capacity, width = tokens.shape[1:]
        steps = torch.arange(self.longest, device=tokens.device)
        inside = (wanted.starts[:, None] + steps).clamp_max_(capacity - 1)
        where = (wanted.rows * groups + wanted.heads)[:, None] * capacity + inside
        found = tokens.view(-1, width).index_select(0, where.flatten())
        return found.view(-1, self.longest, width)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to every tensor."""
        self._held.map(change)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name."""
        if len(self._held):
            yield from {
                "keys": self.keys, "values": self.values, "positions": self.positions,
            }.items()  # fmt: skip

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        self._key_width = tensors["keys"].shape[-1]
        tokens = torch.cat([tensors["keys"], tensors["values"]], dim=-1)
        self._held.load({"tokens": tokens, "positions": tensors["positions"]})
