"""The slow tier on a disk: the tokens of spans as they are, in one file a layer.

Not in the paper (SeKV, arXiv 2606.31145): for contexts that do not fit into memory. Only the tokens
of spans that are asked for are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kvfold.cache.slots import headroom
from kvfold.zoom.tiers import Folded, Wanted
from kvfold.zoom.token_file import TokenFile

_AT_ONCE = 4096
"""Tokens that are copied from one file to another at a time."""


class DiskTier:
    """Keys and values in a file, those of one token next to each other."""

    mean_rank: float | None = None
    """There are no factors."""

    def __init__(self, folder: Path, longest: int) -> None:
        """Start empty, without a file.

        Args:
            folder: Where the file will be; it is removed with the tier.
            longest: L, tokens of the longest span.
        """
        self.longest = longest
        self._folder = folder
        self._file: TokenFile | None = None
        self._rows: list[int] = []
        self._device = torch.device("cpu")

    def __len__(self) -> int:
        """Tokens of the spans of the row that has most, empty places among them included."""
        return 0 if self._file is None else self._file.length

    def _opened(self) -> TokenFile:
        assert self._file is not None, "there are spans"
        return self._file

    @property
    def path(self) -> Path | None:
        """The file; None before the first span."""
        return None if self._file is None else self._file.path

    @property
    def width(self) -> int:
        """2D, numbers of a token's key and value."""
        return self._opened().shape[2]

    @property
    def keys(self) -> torch.Tensor:
        """`[B, G, T, D]`, read from the disk as it is looked at."""
        return self._tokens[..., : self.width // 2]

    @property
    def values(self) -> torch.Tensor:
        """`[B, G, T, D]`, read from the disk as it is looked at."""
        return self._tokens[..., self.width // 2 :]

    @property
    def _tokens(self) -> torch.Tensor:
        """`[B, G, T, 2D]`; a copy where rows were moved."""
        file = self._opened()
        tokens = file.tokens[: file.length].permute(1, 2, 0, 3)
        return tokens if self._is_straight else tokens[self._rows]

    @property
    def _is_straight(self) -> bool:
        """Whether each row stands in the file where it stands in the batch."""
        return self._rows == list(range(self._opened().shape[0]))

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return 0 if self._file is None else self._file.nbytes

    def reserve(self, count: int, like: torch.Tensor) -> None:
        """Make sure that there is room on the disk for tokens to come; see `SlowTier.reserve`."""
        self._prepare(count, (like.shape[0], like.shape[1], 2 * like.shape[-1]), like.dtype)

    def _prepare(self, count: int, shape: tuple[int, int, int], dtype: torch.dtype) -> TokenFile:
        if self._file is None:
            file = TokenFile(self._folder, shape, dtype)
            file.reserve(count)
            self._file, self._rows = file, list(range(shape[0]))
        elif not self._is_straight:
            self._file = self._straightened(count)
            self._rows = list(range(shape[0]))
        elif len(self) + count > self._file.capacity:
            self._file.reserve(len(self) + count + headroom(len(self) + count))
        return self._file

    def _straightened(self, count: int) -> TokenFile:
        """A file in which rows stand as they do in the batch, with room for more tokens."""
        old = self._opened()
        new = TokenFile(old.folder, (len(self._rows), *old.shape[1:]), old.dtype)
        new.reserve(old.length + count + headroom(old.length + count))
        for start in range(0, old.length, _AT_ONCE):
            end = min(start + _AT_ONCE, old.length)
            new.append(old.tokens[start:end, self._rows])
        return new

    def add(self, new: Folded) -> None:
        """Append new spans."""
        tokens = torch.cat([new.keys, new.values], dim=-1)
        rows, heads, count, width = tokens.shape
        file = self._prepare(count, (rows, heads, width), tokens.dtype)
        file.append(tokens.permute(2, 0, 1, 3))
        self._device = tokens.device

    def fetch(self, wanted: Wanted) -> torch.Tensor:
        """Keys and values of spans, `[N, L, 2D]`; anything after a span's last token."""
        file = self._opened()
        rows, heads, width = file.shape
        places = torch.tensor(self._rows)[wanted.rows.cpu()] * heads + wanted.owners.cpu() % heads
        steps = torch.arange(self.longest)
        # No token is read that is not asked for.
        steps = torch.minimum(steps, (wanted.lengths.cpu()[:, None] - 1).clamp_min(0))
        inside = (wanted.starts.cpu()[:, None] + steps).clamp_max_(file.length - 1)
        where = inside * (rows * heads) + places[:, None]
        found = file.tokens.view(-1, width).index_select(0, where.flatten())
        return found.view(-1, self.longest, width).to(self._device)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Note where rows went; the file is written anew when spans are added to it."""
        if self._file is not None:
            self._rows = change(torch.tensor(self._rows)).tolist()

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name."""
        if len(self):
            yield "keys", self.keys
            yield "values", self.values

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `state` back."""
        keys, values = tensors["keys"], tensors["values"]
        tokens = torch.cat([keys, values], dim=-1)
        shape = (tokens.shape[0], tokens.shape[1], tokens.shape[3])
        self._file, self._device = None, keys.device
        self._prepare(tokens.shape[2], shape, tokens.dtype).append(tokens.permute(2, 0, 1, 3))

    def __deepcopy__(self, memo: dict[int, object]) -> DiskTier:
        """A tier with a file of its own."""
        other = DiskTier(self._folder, self.longest)
        other._file = None if self._file is None else self._file.copy()
        other._rows, other._device = list(self._rows), self._device
        return other
