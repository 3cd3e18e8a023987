"""Public texts and questions: from a folder of the user's, else through the `datasets` library."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from kvfold.errors import ConfigError

VARIABLE = "KVFOLD_DATA"
"""Environment variable that names the folder."""
WIKITEXT, HOTPOTQA, GSM8K = "wikitext2-test.txt", "hotpotqa.jsonl", "gsm8k.jsonl"
"""Files in the folder: WikiText-2's test text, and rows of questions as JSON lines."""

_HUB = {
    WIKITEXT: ("Salesforce/wikitext", "wikitext-2-v1", "test"),
    HOTPOTQA: ("hotpotqa/hotpot_qa", "distractor", "validation"),
    GSM8K: ("openai/gsm8k", "main", "test"),
}
_MOST_ROWS = 10_000


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


def require_data(file: str) -> None:
    """Refuse, before anything long starts, data that cannot be had.

    Args:
        file: One of the names above.

    Raises:
        ConfigError: Saying how to get it.
    """
    folder = data_folder()
    if folder is not None and not (folder / file).is_file():
        raise ConfigError(
            f"{VARIABLE} is {str(folder)!r}, which has no {file}: put it there, or unset the "
            "variable to fetch it through the datasets library"
        )
    if folder is None and find_spec("datasets") is None:
        raise ConfigError(
            f"{file} is not at hand: set {VARIABLE} to a folder that has it, or install the "
            "datasets library to fetch it (pip install datasets)"
        )


def wikitext() -> str:
    """WikiText-2's test text.

    Raises:
        ConfigError: When it cannot be had.
    """
    folder = data_folder()
    if folder is not None:
        return _read(folder / WIKITEXT)
    return "\n".join(str(row["text"]).rstrip("\n") for row in _fetch(WIKITEXT))


def questions() -> list[Question]:
    """Questions of HotpotQA's development set with their evidence.

    Raises:
        ConfigError: When they cannot be had.
    """
    folder = data_folder()
    rows = _fetch(HOTPOTQA) if folder is None else _lines(folder / HOTPOTQA)
    try:
        return [
            Question(str(row["question"]), str(row["answer"]), tuple(_evidence(row)))
            for row in rows
        ]
    except (KeyError, TypeError, IndexError) as error:
        raise _unfit(HOTPOTQA, "question, answer and evidence") from error


def problems() -> list[Problem]:
    """Problems of GSM8K's test set.

    Raises:
        ConfigError: When they cannot be had.
    """
    folder = data_folder()
    rows = _fetch(GSM8K) if folder is None else _lines(folder / GSM8K)
    try:
        return [_problem(str(row["question"]), str(row["answer"])) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise _unfit(GSM8K, "question and answer, which ends with #### and a number") from error


def _problem(question: str, answer: str) -> Problem:
    """The calculator's marks `<<...>>` are for training with a calculator, and are left out."""
    worked, result = answer.rsplit("####", 1)
    plain = re.sub(r"<<.*?>>", "", worked).strip()
    return Problem(question.strip(), plain, result.strip().replace(",", ""))


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
    try:
        return [json.loads(line) for line in _read(path).splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not JSON lines ({error}): fetch it again") from error


def _fetch(file: str) -> list[Mapping[str, Any]]:
    """Rows of the data set that a file is a piece of."""
    require_data(file)
    name, config, split = _HUB[file]
    try:
        library = import_module("datasets")
        rows = library.load_dataset(name, config, split=split, streaming=True)
        return list(islice(rows, _MOST_ROWS))
    except Exception as error:  # what it raises depends on the network and the format
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"cannot fetch {name} ({reason}): check the network, or set {VARIABLE} to a folder "
            f"that has {file}"
        ) from error


def _unfit(file: str, fields: str) -> ConfigError:
    return ConfigError(f"a row of {file} lacks {fields}: fetch the file again")
