"""A folder of data in the layout of the public sets, small and made up."""

from __future__ import annotations

import json
from pathlib import Path

from tests.evaluation.benchmark_data import write_benchmarks

PROBLEMS, SHOWN = 108, 100
"""Problems in all, and how many of the last ones serve as worked ones."""
QUESTIONS = 6


def write_data(folder: Path) -> Path:
    """Write the files of all sets; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"Line {n} tells of the {n * n} steps to tower {n} . It is high ." for n in range(400)]
    (folder / "wikitext2-test.txt").write_text("\n".join(lines), encoding="utf-8")
    _write(folder / "hotpotqa.jsonl", [_question(number) for number in range(QUESTIONS)])
    _write(folder / "gsm8k.jsonl", [_problem(number + 1) for number in range(PROBLEMS)])
    write_benchmarks(folder)
    return folder


def _question(number: int) -> dict[str, object]:
    evidence = [
        f"River {number} — It was named {'very ' * number}early by guide {number}.",
        f"Guide {number} — Guide {number} was born in Town{number}.",
    ]
    question = f"Where was the guide born who named river {number}?"
    titles, sentences = zip(*(line.split(" — ") for line in evidence), strict=True)
    context = {"title": titles, "sentences": [[each] for each in sentences]}
    row = {"question": question, "answer": f"Town{number}", "evidence": evidence}
    return row | {"context": context}


def _problem(number: int) -> dict[str, object]:
    sum_ = 1000 + number
    worked = f"There are 1000 + {number} = <<1000+{number}={sum_}>>{sum_} shells."
    question = f"Ann has 1000 shells and finds {number}. How many?"
    return {"question": question, "answer": f"{worked}\n#### {sum_:,}"}


def _write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
