"""What is handed over: files that are whole or not there, strict JSON, and sizes to be read."""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from kvfold.errors import ArtifactError

MIB = 2**20
"""Bytes of a MiB."""

Write = Callable[[Path], object]
"""Writes a file of the name given; it raises OSError when that cannot be done."""


def write_whole(path: Path, write: Write) -> None:
    """Write a file under a temporary name beside it, then rename it.

    Args:
        path: The file; one that is there is replaced.
        write: Called with the temporary name, of an empty file.

    Raises:
        ArtifactError: When the file cannot be written; what was there before is still there.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        temporary.open("xb").close()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        write(temporary)
        # A writer that puts a file of its own in place, as safetensors does, makes it private.
        temporary.chmod(mode)
        os.replace(temporary, path)
    except OSError as error:
        raise _refusal(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_files(folder: Path, files: Mapping[str, Write]) -> tuple[Path, ...]:
    """Write files, each whole, into a folder that is made if it is missing.

    Args:
        folder: Where to.
        files: By name, what writes it.

    Returns:
        The paths, in the order given.

    Raises:
        ArtifactError: When the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refusal(folder, error) from error
    for name, write in files.items():
        write_whole(folder / name, write)
    return tuple(folder / name for name in files)


def json_text(document: object) -> str:
    """A document as indented JSON; infinite and undefined numbers become null."""
    return json.dumps(finite(document), indent=2, allow_nan=False) + "\n"


def finite(value: object) -> object:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def format_bytes(count: float) -> str:
    """A number of bytes as a person reads it: 2048 is `2.0 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _refusal(path: Path, error: OSError) -> ArtifactError:
    return ArtifactError(
        f"cannot write {path} ({error.strerror or error}): choose a folder that exists, may be "
        "written and has room"
    )
