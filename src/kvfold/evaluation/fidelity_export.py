"""An evaluation of fidelity as files: numbers, tables and charts, all whole or not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvfold.artifacts import json_text, write_files
from kvfold.evaluation.fidelity_chart import draw
from kvfold.evaluation.fidelity_heatmap import draw_heatmap, sets_with_depths
from kvfold.evaluation.fidelity_pages import html, markdown
from kvfold.evaluation.fidelity_report import Report
from kvfold.evaluation.fidelity_tradeoff_chart import draw_tradeoff

NUMBERS = "eval.json"
"""Name of the file of all numbers in its folder."""


def write_report(report: Report, folder: Path) -> tuple[Path, ...]:
    """Write all numbers as `eval.json`, and a page with all tables and pictures as `eval.html`.

    By themselves the tables are `eval.md`, the chart is `eval.png`, quality against bytes and speed
    is `tradeoff.png`, and where needles have named depths the answers by depth and length are
    `SET.png`.

    Args:
        report: An evaluation with its statistics.
        folder: Where to; made if missing.

    Returns:
        The paths.

    Raises:
        ArtifactError: When the folder cannot be written to.
    """
    pictures = {
        "eval.png": draw(report),
        "tradeoff.png": draw_tradeoff(report.fidelity),
        **_heatmaps(report),
    }
    texts = {
        NUMBERS: json_text(report.to_dict()),
        "eval.html": html(report, pictures),
        "eval.md": markdown(report),
    }
    return write_files(
        folder,
        {name: _text_writer(text) for name, text in texts.items()}
        | {name: _picture_writer(picture) for name, picture in pictures.items()},
    )


def _heatmaps(report: Report) -> dict[str, bytes]:
    """Pictures by file name."""
    fidelity = report.fidelity
    model, protocol = fidelity.subject.model, fidelity.settings.protocol
    return {
        f"{name}.png": draw_heatmap(
            fidelity.rows,
            name,
            title=f"{name} by depth and length: right answers of {model}, protocol {protocol}",
        )
        for name in sets_with_depths(fidelity.rows)
    }


def _text_writer(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8")


def _picture_writer(picture: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(picture)
