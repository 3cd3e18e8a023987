"""Where texts to learn from are read: files, folders, JSON lines and data sets of the Hub."""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from kvfold.errors import ConfigError

LOG = logging.getLogger(__name__)

_ENDINGS = """
    .c .cc .cfg .cpp .css .csv .go .h .hpp .htm .html .ini .java .js .json .jsonl .kt .log .lua
    .md .php .pl .py .r .rb .rs .rst .scala .sh .sql .swift .tex .toml .ts .tsv .txt .xml .yaml
    .yml
"""
SUFFIXES = frozenset(_ENDINGS.split())
"""Endings of the files that are read in a folder."""

HUB = "hf:"
"""How the name of a data set of the Hub begins."""
STREAMED = 2**25
"""Characters that are read of a data set of the Hub."""
PIECE = 2**14
"""Characters, or a little more, that are tokenized as one."""

FIELD = "text"
"""The field that is read unless another is named."""

_LINES = re.compile(r"(?P<path>.+\.jsonl):(?P<field>[^:/\\]+)")


def read_texts(name: str) -> Iterator[str]:
    """The texts of a source, one after the other.

    Args:
        name: A file, `file.jsonl`, `file.jsonl:field`, a folder, or
            `hf:owner/name[/config][:split[:field]]`.

    Yields:
        Texts that are not empty.

    Raises:
        ConfigError: When the source is missing, cannot be read or has no text.
    """
    empty = True
    for text in _open(name):
        if text.strip():
            empty = False
            yield _whole(name, text)
    if empty:
        raise ConfigError(f"{name} has no text: give a source that has some")


def cut(texts: Iterable[str]) -> Iterator[str]:
    """Texts in pieces that end with a paragraph where they can; an empty line follows each text."""
    for text in texts:
        piece = ""
        for paragraph in re.split(r"(?<=\n\n)(?=[^\n])", f"{text.rstrip()}\n\n"):
            piece += paragraph
            if len(piece) >= PIECE:
                yield piece
                piece = ""
        if piece:
            yield piece


def _whole(name: str, text: str) -> str:
    """The text, unless it has halves of characters, which JSON can spell and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} has half a character ({text[error.start]!a}): leave that text out"
        ) from error
    return text


def _open(name: str) -> Iterator[str]:
    if name.startswith(HUB):
        return _read_hub(name)
    path, lines = Path(name), _LINES.fullmatch(name)
    if lines and not path.exists():
        return _read_lines(Path(lines["path"]), lines["field"])
    if path.is_dir():
        return _read_folder(path)
    return _read_file(path)


def _read_folder(folder: Path) -> Iterator[str]:
    files = [path for path in sorted(folder.rglob("*")) if _shown(path, folder)]
    texts = [path for path in files if path.suffix.lower() in SUFFIXES]
    if not texts:
        endings = " ".join(sorted(SUFFIXES))
        raise ConfigError(f"{folder} holds no text file: give a folder with some of {endings}")
    if len(texts) < len(files):
        LOG.warning("%s: %d of %d files are text", folder, len(texts), len(files))
    for path in texts:
        yield from _read_file(path)


def _shown(path: Path, folder: Path) -> bool:
    """Whether it is a file, and no part of its name below the folder is hidden."""
    parts = path.relative_to(folder).parts
    return path.is_file() and not any(part.startswith(".") for part in parts)


def _read_file(path: Path) -> Iterator[str]:
    if path.suffix.lower() == ".jsonl":
        yield from _read_lines(path, FIELD)
    else:
        yield _decode(path)


def _decode(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file or folder {path}: give one that exists") from error
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror or error}): give a file that can"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it or leave it out"
        ) from error


def _read_lines(path: Path, field: str) -> Iterator[str]:
    for number, line in enumerate(_decode(path).split("\n"), start=1):
        if line.strip():
            yield _field(
                _parse(line, f"line {number} of {path}"), field, f"line {number} of {path}"
            )


def _parse(line: str, where: str) -> object:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON ({error}): give one object a line") from error


def _field(row: object, field: str, where: str) -> str:
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is no JSON object: give one object a line")
    if isinstance(text := row.get(field), str):
        return text
    fields = ", ".join(name for name, value in row.items() if isinstance(value, str)) or "none"
    raise ConfigError(
        f"{where} has no text in field {field!r}: name one that has, after a colon ({fields})"
    )


def _read_hub(name: str) -> Iterator[str]:
    """Rows of a data set as they arrive, up to `STREAMED` characters."""
    owner, _, rest = name.removeprefix(HUB).partition(":")
    split, _, field = rest.partition(":")
    segments = owner.split("/")
    if not 1 <= len(segments) <= 3 or not all(segments):
        raise ConfigError(f"cannot tell the data set in {name}: write {HUB}owner/name/config:split")
    dataset, config = "/".join(segments[:2]), segments[2] if len(segments) == 3 else None
    total = 0
    for number, row in enumerate(_stream(name, dataset, config, split or "train")):
        text = _field(row, field or FIELD, f"row {number} of {name}")
        total += len(text)
        yield text
        if total >= STREAMED:
            LOG.warning("%s: the first %d rows, %d characters, are used", name, number + 1, total)
            return


def _stream(name: str, dataset: str, config: str | None, split: str) -> Iterator[object]:
    library = _datasets(name)
    try:
        yield from library.load_dataset(dataset, config, split=split, streaming=True)
    except Exception as error:  # what it raises depends on the file system and the format
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"cannot read {name} ({reason}): check name, configuration, split and the network"
        ) from error


def _datasets(name: str) -> ModuleType:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigError(f"{name} needs the datasets library: pip install datasets") from error
