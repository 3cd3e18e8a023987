"""A comparison as files: numbers and a chart, both whole or not there at all."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvfold.errors import ConfigError
from kvfold.evaluation.chart import draw
from kvfold.evaluation.results import Comparison


def write_comparison(comparison: Comparison, folder: Path) -> tuple[Path, Path]:
    """Write `compare.json` and `compare.png`.

    Args:
        comparison: What was found.
        folder: Where to; made if missing.

    Returns:
        The two paths.

    Raises:
        ConfigError: When the folder cannot be written to.
    """
    numbers = json.dumps(_finite(comparison.to_dict()), indent=2, allow_nan=False) + "\n"
    contents = {"compare.json": numbers.encode(), "compare.png": draw(comparison)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_whole(folder / name, content)
    except OSError as error:
        raise ConfigError(
            f"cannot write to the folder {str(folder)!r}: {error.strerror}; choose another one"
        ) from error
    return folder / "compare.json", folder / "compare.png"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under a temporary name beside it, then rename it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o666 & ~_mask())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _mask() -> int:
    """The process's file mode mask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _finite(value: object) -> object:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
