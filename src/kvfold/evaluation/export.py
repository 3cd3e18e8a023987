"""A comparison as files: numbers and a chart, both whole or not there at all."""

from __future__ import annotations

from pathlib import Path

from kvfold.artifacts import json_text, write_files
from kvfold.evaluation.chart import draw
from kvfold.evaluation.results import Comparison


def write_comparison(comparison: Comparison, folder: Path) -> tuple[Path, ...]:
    """Write `compare.json` and `compare.png`.

    Args:
        comparison: What was found.
        folder: Where to; made if missing.

    Returns:
        The two paths.

    Raises:
        ArtifactError: When the folder cannot be written to.
    """
    numbers, chart = json_text(comparison.to_dict()), draw(comparison)
    return write_files(
        folder,
        {
            "compare.json": lambda path: path.write_text(numbers, encoding="utf-8"),
            "compare.png": lambda path: path.write_bytes(chart),
        },
    )
