"""The slow tier: the keys and values of the tokens of all spans of a layer.

What every form of it can do, and the plainest one, which holds them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from kvfold.ops.selection import EMPTY
from kvfold.zoom.growing import Growing


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Spans to be brought to the fast tier, `[N]` each."""

    rows: torch.Tensor
    """Row of the batch."""
    owners: torch.Tensor
    """Row and kv head, `row * G + head`."""
    spans: torch.Tensor
    """Number of the span in its row."""
    starts: torch.Tensor
    """Its first token among those of its row's spans."""
    lengths: torch.Tensor
    """Its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """The tokens of new spans, those of a row one after the other."""

    keys: torch.Tensor
    """`[B, G, N, D]`, rotated."""
    values: torch.Tensor
    """`[B, G, N, D]`."""
    positions: torch.Tensor
    """Logical ones, `[B, N]`; negative where a row has fewer."""
    lengths: torch.Tensor
    """Tokens of each span, `[B, S]`; 0 where a row has fewer."""
    mean_keys: torch.Tensor
    """Of each span, `[B, G, S, D]`."""


class SlowTier(Protocol):
    """Holds the tokens of the spans of one layer and brings those of some to the fast tier."""

    longest: int
    """L, tokens of the longest span that is held."""

    def __len__(self) -> int:
        """Tokens of the spans of the row that has most, empty places among them included."""
        ...

    @property
    def width(self) -> int:
        """2D, numbers of a token's key and value."""
        ...

    @property
    def nbytes(self) -> int:
        """Of all that is held."""
        ...

    @property
    def mean_rank(self) -> float | None:
        """Components that spans are held in, on average; None where all are held as they are."""
        ...

    def reserve(self, count: int, like: torch.Tensor) -> None:
        """Make sure that there is room for tokens to come, before anything is changed.

        Args:
            count: N of them in each row.
            like: Keys of the layer, `[B, G, *, D]`.

        Raises:
            ArtifactError: When there is none.
        """
        ...

    def add(self, new: Folded) -> None:
        """Append new spans."""
        ...

    def fetch(self, wanted: Wanted) -> torch.Tensor:
        """Keys and values of spans, `[N, L, 2D]`; anything after a span's last token."""
        ...

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply a change of the batch dimension to all that is held."""
        ...

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name."""
        ...

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        ...


class RawTier:
    """Keys and values as they are; those of one token next to each other."""

    mean_rank: float | None = None
    """There are no factors."""

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
    def tokens(self) -> torch.Tensor:
        """Keys and values, `[B, G, T, 2D]`, a view."""
        return self._held["tokens"]

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
        """Logical positions, `[B, 1, T]`; negative where a row has no token.

        And where the tokens were read from the file of a tier that does not know them.
        """
        return self._held["positions"]

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return self._held.nbytes

    def reserve(self, count: int, like: torch.Tensor) -> None:
        """Nothing: memory is not refused in advance."""

    def add(self, new: Folded) -> None:
        """Append new spans."""
        self._key_width = new.keys.shape[-1]
        tokens = torch.cat([new.keys, new.values], dim=-1)
        self._held.append({"tokens": tokens, "positions": new.positions[:, None].int()})

    def fetch(self, wanted: Wanted) -> torch.Tensor:
        """Keys and values of spans, `[N, L, 2D]`; anything after a span's last token."""
        where = self._places(wanted.owners, wanted.starts)
        found = self._held.whole("tokens").view(-1, self.width).index_select(0, where)
        return found.view(-1, self.longest, self.width)

    def _places(self, owners: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Where the tokens of spans stand among those of all rows and heads, `[N * L]`."""
        capacity = self._held.whole("tokens").shape[2]
        steps = torch.arange(self.longest, device=starts.device)
        inside = (starts[:, None] + steps).clamp_max_(capacity - 1)
        return inside.add_(owners[:, None], alpha=capacity).flatten()

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
        positions = tensors.get("positions")
        if positions is None:
            positions = torch.full_like(tokens[:, :1, :, 0], EMPTY, dtype=torch.int32)
        self._held.load({"tokens": tokens, "positions": positions})
