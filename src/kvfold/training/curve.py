"""The curve of a training run as a picture."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvfold.artifacts import write_whole
from kvfold.training.record import TrainingRecord

_INK, _PALE, _TRAIN, _VALIDATION, _BEST = "#222222", "#8a8a8a", "#0072b2", "#d55e00", "#00754f"
_COLUMNS = 3
_SHARE_OF_MEAN = 20
"""A running mean is over one of so many parts of the steps."""


def plot_curve(record: TrainingRecord, path: str | Path) -> None:
    """Draw a run, one panel a metric: steps with their running mean, validations, and the best.

    Args:
        record: The run.
        path: The PNG file; one that is there is replaced.

    Raises:
        ArtifactError: When the file cannot be written.

    Example:
        >>> plot_curve(record, "curve.png")  # doctest: +SKIP
    """
    image = draw(record)
    write_whole(Path(path), lambda temporary: temporary.write_bytes(image))


def draw(record: TrainingRecord) -> bytes:
    """Draw a run.

    Args:
        record: The run.

    Returns:
        A PNG file.
    """
    names = _names(record)
    columns = min(_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    size = (max(4.4 * columns, 7.5), 2.7 * rows + 0.7)
    figure = Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for name, axes in zip(names, panels, strict=False):
        _draw_metric(axes, record, name)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    best = record.best_metrics[record.criterion]
    title = (
        f"{record.steps:,} steps; lowest {record.criterion} {best:.4g} after {record.best_step:,}"
    )
    figure.suptitle(_plain(title), fontsize=11, color=_INK)
    image = io.BytesIO()
    canvas.print_png(image)
    return image.getvalue()


def _names(record: TrainingRecord) -> list[str]:
    """All metrics with a number to show, the criterion first, then in the order they came."""
    names = {record.criterion: None}
    for point in record.curve:
        measured = [*point["train"].items(), *point["validation"].items()]
        names |= dict.fromkeys(name for name, value in measured if value is not None)
    return list(names)


def _draw_metric(axes: Axes, record: TrainingRecord, name: str) -> None:
    steps, values = _series(record, name, "train")
    window = max(1, len(steps) // _SHARE_OF_MEAN)
    if len(steps):
        axes.plot(steps, values, ".", markersize=2.5, color=_TRAIN, alpha=0.35, label="step")
        mean = np.convolve(values, np.ones(window) / window, "valid")
        label = f"mean of {window}"
        axes.plot(steps[window - 1 :], mean, linewidth=1.4, color=_TRAIN, label=label)
    steps, values = _series(record, name, "validation")
    if len(steps):
        axes.plot(
            steps, values, "o-", markersize=3.5, linewidth=1, color=_VALIDATION, label="validation"
        )
        best = steps == record.best_step
        axes.plot(steps[best], values[best], "*", markersize=12, color=_BEST, label="best")
    axes.axvline(record.best_step, color=_BEST, linewidth=0.8, linestyle=":")
    axes.set_title(_plain(name), loc="left", fontsize=10, color=_INK)
    axes.set_xlabel("steps", fontsize=8, color=_PALE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)


def _series(
    record: TrainingRecord, name: str, kind: Literal["train", "validation"]
) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values where the metric was a number."""
    found = [(p["step"], value) for p in record.curve if (value := p[kind].get(name)) is not None]
    pairs = np.array(found, dtype=float).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _plain(text: str) -> str:
    """The text without the dollar signs that would start a formula."""
    return text.replace("$", r"\$")
