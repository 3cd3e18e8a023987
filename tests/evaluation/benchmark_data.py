"""Rows of public benchmarks, small and made up, in the layout that each has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvfold.evaluation.benchmarks import TASKS

ROWS = 6
"""Of each task."""


def write_benchmarks(folder: Path) -> None:
    """Write the files of all tasks."""
    for name, task in TASKS.items():
        benchmark, _, part = name.partition("/")
        if benchmark in _WRITERS:
            _WRITERS[benchmark](folder, part, [source.file for source in task.sources])


def _longbench(folder: Path, task: str, files: list[str]) -> None:
    classes = ["Animal", "Colour", "Colour of hair"] if task in ("trec", "lsht") else None
    right = {"passage_count": "7", "passage_retrieval_en": "Paragraph 3"}.get(task, "red")
    right = "段落3" if task == "passage_retrieval_zh" else "Colour" if classes else right
    _lines(
        folder / files[0],
        (
            {
                "input": f"What is number {number}?",
                "context": f"Page {number}. " + f"Leaf {number} is red {{today}}. " * 9,
                "answers": [right, "never said"] if classes is None else [right],
                "length": 50,
                "dataset": task,
                "language": "en",
                "all_classes": classes,
                "_id": f"{task}{number}",
            }
            for number in range(ROWS)
        ),
    )


def _infinitebench(folder: Path, task: str, files: list[str]) -> None:
    options = ["Ann", "Bob", "Cid", "Dan"]
    has_options = task in ("longbook_choice_eng", "code_debug")
    _lines(
        folder / files[0],
        (
            {
                "id": number,
                "context": f"Chapter {number}. " + "Nothing happens here. " * 12,
                "input": _INPUTS.get(task, "Who is it in chapter {}?").format(number),
                "answer": _ANSWERS.get(task, ["Cid"]),
                "options": options if has_options else [],
            }
            for number in range(ROWS)
        ),
    )


_INPUTS = {
    "math_find": "One number, no words. The second largest number of the list is:",
    "code_run": "Give the return value of func_{0}(-{0}).",
}
"""What is asked, where it is not who is there."""
_ANSWERS: dict[str, object] = {
    "passkey": "71432",
    "number_string": ["71432"],
    "math_find": 48.5,
    "math_calc": [[4, 8]],
    "code_run": [-7],
}
"""What is right, where it is not who is there: in each of the layouts that files have had."""


_RULER = {
    "vt": "\nQuestion: Find all variables that are assigned the value {} in the text above.",
    "cwe": "\nQuestion: What are the 10 most common words in the above list? {}",
    "fwe": "\nQuestion: Do not provide any explanation. {}",
    "qa": "\n\nAnswer the question based on the given documents. Only give me the answer.\n\n"
    "Question: {}",
}
"""How questions begin, by the task or the beginning of its name."""


def _ruler(folder: Path, task: str, files: list[str]) -> None:
    needle = "\nWhat are all the special magic numbers for {} mentioned in the provided text?"
    ask = _RULER.get(task.partition("_")[0], needle)
    lead = "Answer the question based on the given documents.\n" if task.startswith("qa") else ""
    _lines(
        folder / files[0],
        (
            {
                "index": number,
                "input": f"{lead}Question: none. "
                + f"Grass {number} is green. " * 9
                + ask.format(f"grass {number}"),
                "outputs": ["green", "grass"],
                "length": 99,
                "length_w_model_temp": 99,
                "answer_prefix": " Answer:",
            }
            for number in range(ROWS)
        ),
    )


def _bbh(folder: Path, task: str, files: list[str]) -> None:
    examples = [{"input": f"not {number} is", "target": "False"} for number in range(ROWS)]
    _write(folder / files[0], json.dumps({"canary": "keep out", "examples": examples}))
    shown = "Q: not 77 is\nA: Let's think step by step.\nIt is false. So the answer is False."
    _write(folder / files[1], f"keep out\n-----\nEvaluate.\n\n{shown}")


def _cmrc2018(folder: Path, task: str, files: list[str]) -> None:
    answers = [{"text": "北京大学", "answer_start": 0}, {"text": "北大", "answer_start": 0}]
    paragraphs = [
        {
            "id": f"P{number}",
            "context": f"{number} 在北京大学学习." * 5,
            "qas": [{"question": f"{number} 在哪里?", "id": f"Q{number}", "answers": answers}],
        }
        for number in range(ROWS)
    ]
    data = [{"paragraphs": [each], "title": ""} for each in paragraphs]
    _write(folder / files[0], json.dumps({"version": "v1", "data": data}, ensure_ascii=False))


_WRITERS = {
    "longbench": _longbench,
    "infinitebench": _infinitebench,
    "ruler": _ruler,
    "bbh": _bbh,
    "cmrc2018": _cmrc2018,
}


def _lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    # As it comes: a line separator inside a text is no end of a row.
    _write(
        path, "\n".join(json.dumps(row | {"note": "a\u2028b"}, ensure_ascii=False) for row in rows)
    )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
