"""A safetensors file of tokens that grows without being rewritten, and is read where it is asked.

One tensor `tokens`, `[T, B, G, W]`: what is new stands at the end. The header has a fixed room, and
the tensor in it covers the whole file, of which the first `length` tokens were written.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

import torch

from kvfold.errors import ArtifactError

HEADER = 512
"""Bytes before the tokens."""
_ZEROS = 1 << 20
"""Bytes that are written at once to take room."""
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


class TokenFile:
    """The file of one layer; it is removed when nothing refers to it any more."""

    def __init__(self, folder: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        """Make an empty file of a name that no other has.

        Args:
            folder: Where.
            shape: B, G and W.
            dtype: Of the numbers.

        Raises:
            ArtifactError: When no file can be made there.
        """
        self.folder, self.shape, self.dtype = folder, shape, dtype
        self.length = self.capacity = 0
        try:
            file, name = tempfile.mkstemp(".safetensors", "kvfold-", folder)
            os.close(file)
        except OSError as error:
            raise _refusal(folder, error) from error
        self.path = Path(name)
        self._remove = weakref.finalize(self, _forget, self.path, os.getpid())
        self._mapped: torch.Tensor | None = None

    @property
    def token_bytes(self) -> int:
        """Of one token of every row and head."""
        rows, heads, width = self.shape
        return rows * heads * width * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Of the file."""
        return HEADER + self.capacity * self.token_bytes if self.capacity else 0

    def reserve(self, capacity: int) -> None:
        """Take room for so many tokens; nothing changes when there is none.

        Raises:
            ArtifactError: When the disk is full.
        """
        if capacity <= self.capacity:
            return
        size = HEADER + capacity * self.token_bytes
        try:
            with self.path.open("r+b", buffering=0) as file:
                _allocate(file, size)
                file.write(self._header(capacity))
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, self.nbytes)
            raise _refusal(self.folder, error) from error
        self.capacity, self._mapped = capacity, None

    def _header(self, capacity: int, length: int | None = None) -> bytes:
        end = capacity * self.token_bytes
        tokens = {
            "dtype": _NAMES[self.dtype],
            "shape": [capacity, *self.shape],
            "data_offsets": [0, end],
        }
        room = HEADER - 8
        length = self.length if length is None else length
        text = json.dumps({"__metadata__": {"length": str(length)}, "tokens": tokens})
        return room.to_bytes(8, "little") + text.encode().ljust(room)

    def append(self, tokens: torch.Tensor) -> None:
        """Write tokens `[N, B, G, W]`, for which there must be room, after the last.

        Raises:
            ArtifactError: When they cannot be written; those before are still there.
        """
        raw = tokens.detach().to("cpu", self.dtype).contiguous().flatten().view(torch.uint8)
        try:
            with self.path.open("r+b") as file:
                file.seek(HEADER + self.length * self.token_bytes)
                file.write(raw.numpy().data)
                file.seek(0)
                file.write(self._header(self.capacity, self.length + len(tokens)))
        except OSError as error:
            raise _refusal(self.folder, error) from error
        self.length += len(tokens)

    @property
    def tokens(self) -> torch.Tensor:
        """All that was written and the room after it, mapped into memory: `[T, B, G, W]`."""
        if self._mapped is None:
            size = HEADER + self.capacity * self.token_bytes
            mapped = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
            self._mapped = mapped[HEADER:].view(self.dtype).view(-1, *self.shape)
        return self._mapped

    def copy(self) -> TokenFile:
        """Another file with the same tokens.

        Raises:
            ArtifactError: When the disk is full.
        """
        other = TokenFile(self.folder, self.shape, self.dtype)
        if self.capacity:
            other.reserve(self.capacity)
            try:
                shutil.copyfile(self.path, other.path)
            except OSError as error:
                raise _refusal(self.folder, error) from error
            other.length = self.length
        return other


def _allocate(file: io.RawIOBase, size: int) -> None:
    """Make a file larger and take its room at once, by zeros where the system has no other way."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        else:
            return
    place = file.seek(0, os.SEEK_END)
    while place < size:
        place += file.write(bytes(min(_ZEROS, size - place))) or 0
    file.seek(0)


def _forget(path: Path, process: int) -> None:
    """Remove a file, unless this is but a fork of the process that made it."""
    if os.getpid() == process:
        with suppress(OSError):
            path.unlink()


def _refusal(folder: Path, error: OSError) -> ArtifactError:
    return ArtifactError(
        f"{folder} cannot hold the slow tier ({error.strerror or error}): make room there and "
        "go on with the tokens after these, which are held, or give another folder as disk"
    )
