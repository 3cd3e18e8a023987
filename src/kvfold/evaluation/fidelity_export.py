"""An evaluation of fidelity as files: numbers, tables and a chart, all whole or not there."""

from __future__ import annotations

from pathlib import Path

from kvfold.artifacts import json_text, write_files
from kvfold.evaluation.fidelity_chart import draw
from kvfold.evaluation.fidelity_report import Report
from kvfold.evaluation.fidelity_tables import markdown


def write_report(report: Report, folder: Path) -> tuple[Path, ...]:
    """Write `eval.json`, `eval.md` and `eval.png`.

    Args:
        report: An evaluation with its statistics.
        folder: Where to; made if missing.

    Returns:
        The three paths.

    Raises:
        ArtifactError: When the folder cannot be written to.
    """
    numbers, text, chart = json_text(report.to_dict()), markdown(report), draw(report)
    return write_files(
        folder,
        {
            "eval.json": lambda path: path.write_text(numbers, encoding="utf-8"),
            "eval.md": lambda path: path.write_text(text, encoding="utf-8"),
            "eval.png": lambda path: path.write_bytes(chart),
        },
    )
