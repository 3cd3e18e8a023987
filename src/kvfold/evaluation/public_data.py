"""Public texts and questions: from a folder of the user's, else through the `datasets` library."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from kvfold.errors import ConfigError

VARIABLE = "KVFOLD_DATA"
"""Environment variable that names the folder."""
_MOST_ROWS = 10_000
_UNSET = ", or unset the variable to fetch it through the datasets library"
_INSTALL = ", or install the datasets library to fetch it (pip install datasets)"


@dataclass(frozen=True, slots=True)
class Source:
    """Where data come from: a file in the folder, else the `datasets` library."""

    file: str
    """In the folder: text, JSON lines, or JSON with the rows in the option `field`."""
    dataset: str | None
    """What the library loads; None where it cannot."""
    config: str | None = None
    """Which part of it."""
    split: str = "train"
    """Which split of it."""
    options: Mapping[str, str] = field(default_factory=dict)
    """What else the library is told."""
    advice: str | None = None
    """Where to get the file."""


WIKITEXT = Source("wikitext2-test.txt", "Salesforce/wikitext", "wikitext-2-v1", "test")
"""WikiText-2's test text."""
HOTPOTQA = Source("hotpotqa.jsonl", "hotpotqa/hotpot_qa", "distractor", "validation")
"""Questions of HotpotQA's development set."""
GSM8K = Source("gsm8k.jsonl", "openai/gsm8k", "main", "test")
"""Problems of GSM8K's test set."""
EXEMPLARS = 100
"""So many last problems serve as worked ones, and are never asked."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question that some sentences answer together."""

    question: str
    """What is asked."""
    answer: str
    """A few words."""
    evidence: tuple[str, ...]
    """Sentences, each with the title it is from."""


@dataclass(frozen=True, slots=True)
class Problem:
    """An arithmetic problem in words."""

    question: str
    """What is told and asked."""
    worked: str
    """The solution without its result."""
    result: str
    """The final number, without commas."""


def data_folder() -> Path | None:
    """The folder that the environment names; None where it names none."""
    name = os.environ.get(VARIABLE, "")
    return Path(name) if name.strip() else None


def is_at_hand(source: Source) -> bool:
    """Whether the folder has a file, so that nothing has to be fetched."""
    folder = data_folder()
    return folder is not None and (folder / source.file).is_file()


def require_data(source: Source) -> None:
    """Refuse, before anything long starts, data that cannot be had.

    Args:
        source: Where they come from.

    Raises:
        ConfigError: Saying how to get them.
    """
    folder, file = data_folder(), source.file
    origin = "" if source.advice is None else f" ({source.advice})"
    if folder is not None and not (folder / file).is_file():
        fetch = "" if source.dataset is None else _UNSET
        raise ConfigError(
            f"{VARIABLE} is {str(folder)!r}, which has no {file}: put it there{origin}{fetch}"
        )
    if folder is None and (source.dataset is None or find_spec("datasets") is None):
        install = "" if source.dataset is None else _INSTALL
        raise ConfigError(
            f"{file} is not at hand: set {VARIABLE} to a folder that has it{origin}{install}"
        )


def rows_of(source: Source) -> list[Mapping[str, Any]]:
    """The rows of a source; of a text one, with the field `text`.

    Raises:
        ConfigError: When they cannot be had.
    """
    folder = data_folder()
    if folder is None:
        return _fetch(source)
    path = folder / source.file
    if path.suffix == ".txt":
        return [{"text": _read(path)}]
    return _lines(path) if path.suffix == ".jsonl" else _whole(path, source.options["field"])


def wikitext() -> str:
    """WikiText-2's test text.

    Raises:
        ConfigError: When it cannot be had.
    """
    folder = data_folder()
    if folder is not None:
        return _read(folder / WIKITEXT.file)
    return "\n".join(str(row["text"]).rstrip("\n") for row in _fetch(WIKITEXT))


def questions() -> list[Question]:
    """Questions of HotpotQA's development set with their evidence.

    Raises:
        ConfigError: When they cannot be had.
    """
    try:
        return [
            Question(str(row["question"]), str(row["answer"]), tuple(_evidence(row)))
            for row in rows_of(HOTPOTQA)
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise _unfit(HOTPOTQA, "question, answer and evidence") from error


def problems() -> list[Problem]:
    """Problems of GSM8K's test set.

    Raises:
        ConfigError: When they cannot be had.
    """
    try:
        return list(map(problem_of, rows_of(GSM8K)))
    except (KeyError, TypeError, ValueError) as error:
        raise _unfit(GSM8K, "question and answer, which ends with #### and a number") from error


def problem_of(row: Mapping[str, Any]) -> Problem:
    """A row of GSM8K.

    The calculator's marks `<<...>>` are for training with a calculator, and are left out.

    Raises:
        KeyError, ValueError: When it is not one.
    """
    worked, result = str(row["answer"]).rsplit("####", 1)
    plain = re.sub(r"<<.*?>>", "", worked).strip()
    return Problem(str(row["question"]).strip(), plain, result.strip().replace(",", ""))


def _evidence(row: Mapping[str, Any]) -> Iterable[str]:
    if "evidence" in row:
        return map(str, row["evidence"])
    context, facts = row["context"], row["supporting_facts"]
    sentences = dict(zip(context["title"], context["sentences"], strict=True))
    return [
        f"{title} — {sentences[title][number].strip()}"
        for title, number in zip(facts["title"], facts["sent_id"], strict=True)
        if number < len(sentences[title])
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {str(path)!r} ({error}): set {VARIABLE} to a folder that has it"
        ) from error


def _lines(path: Path) -> list[Mapping[str, Any]]:
    # A line ends at a line feed alone: texts have other separators in them.
    return [_json(path, line) for line in _read(path).split("\n") if line.strip()]


def _whole(path: Path, field_: str) -> list[Mapping[str, Any]]:
    document = _json(path, _read(path))
    if not isinstance(document, dict) or not isinstance(document.get(field_), list):
        raise ConfigError(f"{str(path)!r} has no list {field_!r}: fetch it again")
    return document[field_]


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not JSON ({error}): fetch it again") from error


def _fetch(source: Source) -> list[Mapping[str, Any]]:
    """Rows of the data set that a file is a piece of."""
    require_data(source)
    try:
        library = import_module("datasets")
        rows = library.load_dataset(
            source.dataset, source.config, split=source.split, streaming=True, **source.options
        )
        return list(islice(rows, _MOST_ROWS))
    except Exception as error:  # what it raises depends on the network and the format
        reason = " ".join(str(error).split()) or type(error).__name__
        name = source.options.get("data_files", source.dataset)
        raise ConfigError(
            f"cannot fetch {name} ({reason}): check the network, or set {VARIABLE} to a folder "
            f"that has {source.file}"
        ) from error


def _unfit(source: Source, fields: str) -> ConfigError:
    return ConfigError(f"a row of {source.file} lacks {fields}: fetch the file again")
