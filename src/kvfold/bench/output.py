"""A result in files: JSON and a chart, each whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvfold.bench.chart import draw
from kvfold.bench.comparison import BenchResult


def write_result(result: BenchResult, folder: Path) -> tuple[Path, Path]:
    """Write `bench-KIND.json` and `bench-KIND.png`.

    Args:
        result: What was measured.
        folder: Where to; made if it is missing.

    Returns:
        The two files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = (folder / f"bench-{result.kind}.{end}" for end in ("json", "png"))
    text = json.dumps(result.to_dict(), indent=2) + "\n"
    _replace(data, lambda path: path.write_text(text, encoding="utf-8"))
    _replace(picture, lambda path: draw(result).savefig(path, format="png", dpi=130))
    return data, picture


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(name))
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
