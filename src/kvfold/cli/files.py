"""Files that the user names: read and checked before anything long starts."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from kvfold.errors import ConfigError


def read_text(path: Path) -> str:
    """Read a UTF-8 text file.

    Raises:
        ConfigError: The file is missing, not readable, not UTF-8 or holds nothing but blanks.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{str(path)!r} is not UTF-8 text (byte {error.start}); convert it to UTF-8 first"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {str(path)!r}: {error.strerror}; give the path of a text file"
        ) from error
    if not text.strip():
        raise ConfigError(f"{str(path)!r} is empty; give a file with text in it")
    return text


def output_folder(name: str) -> Path:
    """Make sure that files can be written to a folder, and leave everything as it was.

    Args:
        name: Of the folder; it need not exist yet.

    Returns:
        Its path.

    Raises:
        ConfigError: It has no name, cannot be made, or not be written to.
    """
    if not name.strip():
        raise ConfigError("the name of the output folder is empty: give one, or . for this folder")
    path = Path(name)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write to the folder {str(path)!r}: {error.strerror}; choose another one"
        ) from error
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
    return path
