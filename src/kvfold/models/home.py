"""What fetching and loading share: progress, and the errors of a disk that does not play along."""

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfold.errors import ConfigError, KVFoldError

Progress = Callable[[str], None]
"""Receives one line about each stage of long work."""

_MEGABYTE = 1_000_000


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns a full disk or a folder that cannot be written into one clear error.

    Raises:
        ConfigError: The folder cannot be written.
        KVFoldError: The disk is full.
    """
    try:
        yield
    except Exception as error:
        if is_disk_full(error):
            raise KVFoldError(
                f"the disk of {folder} is full: make room, or set KVFOLD_HOME to another disk"
            ) from error
        if isinstance(error, PermissionError | FileExistsError | NotADirectoryError) or (
            isinstance(error, OSError) and error.errno == errno.EROFS
        ):
            raise ConfigError(
                f"{folder} cannot be written ({error.strerror}): "
                "set KVFOLD_HOME to a folder that can"
            ) from error
        raise


def is_disk_full(error: BaseException) -> bool:
    """Says whether an error, of whichever library, comes from a full disk."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return says_disk_full(str(error))


def says_disk_full(text: str) -> bool:
    """Says whether a message speaks of a full disk."""
    return "No space left on device" in text or "Disk quota exceeded" in text


def require_space(folder: Path, needed: int) -> None:
    """Raises KVFoldError unless `needed` bytes are free on the disk of `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise KVFoldError(
            f"{needed // _MEGABYTE} MB are needed in {folder} and {free // _MEGABYTE} MB are free: "
            "make room, or set KVFOLD_HOME to another disk"
        )
