"""A result in files: JSON and a chart, each whole or not at all."""

from __future__ import annotations

from pathlib import Path

from kvfold.artifacts import json_text, write_files
from kvfold.bench.chart import draw
from kvfold.bench.comparison import BenchResult


def write_result(result: BenchResult, folder: Path) -> tuple[Path, ...]:
    """Write `bench-KIND.json` and `bench-KIND.png`.

    Args:
        result: What was measured.
        folder: Where to; made if it is missing.

    Returns:
        The two files.

    Raises:
        ArtifactError: When the folder cannot be written to.
    """
    text, name = json_text(result.to_dict()), f"bench-{result.kind}"
    return write_files(
        folder,
        {
            f"{name}.json": lambda path: path.write_text(text, encoding="utf-8"),
            f"{name}.png": lambda path: draw(result).savefig(path, format="png", dpi=130),
        },
    )
