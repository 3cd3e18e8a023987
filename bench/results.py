"""The record in `results/`: what is kept of an evaluation, and the README's table of it.

python -m bench.results EVALUATION RECORD    keep the evaluation in a folder as a record
python -m bench.results README               write the table of results/quick into it
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvfold.artifacts import json_text, write_files

ROOT = Path(__file__).parents[1]
QUICK = ROOT / "results" / "quick"
BEGIN, END = "<!-- begin: make results-quick -->", "<!-- end: make results-quick -->"
"""The README's table stands between these lines."""
LONG = ("divergences", "agreements", "answer")
"""What the rows of a record leave out."""
NUMBERS, ROWS = "eval.json", "results.jsonl"
PAGES = ("eval.md", "*.png")
"""Files that are kept as they are."""

_COLUMNS = (
    *("method", "budget", "KL to full on prose (95 %)", "needles found", "sums right"),
    *("fast bytes", "slow bytes"),
)


def keep(evaluation: Path, record: Path) -> None:
    """Keep an evaluation's numbers, short rows, tables and pictures.

    Args:
        evaluation: The folder that `kvfold eval --out` wrote.
        record: Where to, in place of an older record.
    """
    document = json.loads((evaluation / NUMBERS).read_text(encoding="utf-8"))
    rows = document.pop("rows")
    for old in record.glob("*.png"):
        old.unlink()
    kept = {
        NUMBERS: lambda path: path.write_text(json_text(document), encoding="utf-8"),
        ROWS: lambda path: path.write_text(_lines(rows), encoding="utf-8"),
    }
    write_files(record, kept)
    for pattern in PAGES:
        for page in evaluation.glob(pattern):
            shutil.copyfile(page, record / page.name)


def read(record: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Numbers and rows of a record."""
    lines = (record / ROWS).read_text(encoding="utf-8").splitlines()
    numbers = json.loads((record / NUMBERS).read_text(encoding="utf-8"))
    return numbers, [json.loads(line) for line in lines]


def table(document: Mapping[str, Any]) -> str:
    """A record's quality as Markdown: no speed, which was measured by the way."""
    runs = dict.fromkeys((each["method"], each["budget"]) for each in document["summaries"])
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(_line(document, *run) for run in runs)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def with_table(readme: str, document: Mapping[str, Any]) -> str:
    """A text with the table between its marks."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the marks {BEGIN} and {END} are missing: put them where the table goes")
    return f"{before}{BEGIN}\n\n{table(document)}\n\n{END}{after}"


def _line(document: Mapping[str, Any], method: str, budget: str) -> Sequence[str]:
    texts = _of(document["summaries"], group="prose", method=method, budget=budget)["kl"]
    needles, sums = (
        _of(document["grid"], set=name, method=method, budget=budget)
        for name in ("niah", "arithmetic")
    )
    return (
        f"`{method}`",
        budget,
        f"{texts['mean']:.3f} ({texts['low']:.3f} to {texts['high']:.3f})",
        *(f"{each['answers']['right']} of {each['answers']['count']}" for each in (needles, sums)),
        f"{needles['bytes_fast']:.1%}",
        f"{needles['bytes_slow']:.1%}",
    )


def _of(entries: Iterable[Mapping[str, Any]], **facts: object) -> Mapping[str, Any]:
    """The one entry with these facts."""
    (found,) = [each for each in entries if all(each[name] == facts[name] for name in facts)]
    return found


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    short = ({name: row[name] for name in row if name not in LONG} for row in rows)
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in short)


def main(arguments: Sequence[str]) -> None:
    """Do what the command line asks for."""
    first, *others = map(Path, arguments)
    if others:
        keep(first, *others)
    else:
        readme = with_table(first.read_text(encoding="utf-8"), read(QUICK)[0])
        write_files(
            first.parent, {first.name: lambda path: path.write_text(readme, encoding="utf-8")}
        )


if __name__ == "__main__":
    main(sys.argv[1:])
