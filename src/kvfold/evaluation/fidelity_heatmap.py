"""Where in a text needles are found: depth by length, one panel a method and budget."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kvfold.evaluation.fidelity_grid import share_right
from kvfold.evaluation.fidelity_rows import Row
from kvfold.evaluation.fidelity_settings import FULL
from kvfold.evaluation.statistics import Share

_COLOURS = LinearSegmentedColormap.from_list("right", ["#f2c0a8", "#f7f3e3", "#a9d8b5"])
"""Light, so that the numbers stand out."""
_LEAST_WIDTH, _LETTERS_AN_INCH = 4.0, 12
"""Of the picture in inches, and of its title."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """What all panels share."""

    methods: list[str]
    budgets: list[str]
    lengths: list[int]
    depths: list[float]


def sets_with_depths(rows: Iterable[Row]) -> list[str]:
    """Sets whose needles stand at named depths."""
    return list(dict.fromkeys(row.set for row in rows if row.depth is not None))


def draw_heatmap(rows: Sequence[Row], name: str, *, title: str) -> bytes:
    """Draw the share of right answers by depth and length: methods below one another.

    Args:
        rows: Of an evaluation, those of the full cache among them.
        name: Of a set whose needles stand at named depths.
        title: Above the picture.

    Returns:
        A PNG file.
    """
    own = [row for row in rows if row.set == name and row.depth is not None]
    frame = _frame(own)
    across, down = max(len(frame.budgets), 1), 1 + len(frame.methods)
    width, height = 0.8 + 0.5 * len(frame.lengths), 0.8 + 0.28 * len(frame.depths)
    size = (max(1.0 + width * across, _LEAST_WIDTH), 1.2 + height * down)
    figure = Figure(figsize=size, dpi=130, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False)
    for axes in panels.flat:
        axes.set_visible(False)
    _draw_panel(panels[0][0], frame, [row for row in own if row.method == FULL], FULL)
    for line, method in enumerate(frame.methods, start=1):
        for column, budget in enumerate(frame.budgets):
            cells = [row for row in own if (row.method, row.budget) == (method, budget)]
            if cells:
                _draw_panel(panels[line][column], frame, cells, f"{method} at {budget}")
    figure.suptitle(textwrap.fill(title, int(size[0] * _LETTERS_AN_INCH)), fontsize=10)
    figure.supxlabel("length in tokens", fontsize=8)
    figure.supylabel("depth of the needle", fontsize=8)
    image = io.BytesIO()
    canvas.print_png(image)
    return image.getvalue()


def _frame(rows: Sequence[Row]) -> _Frame:
    judged = [row for row in rows if row.method != FULL]
    return _Frame(
        methods=list(dict.fromkeys(row.method for row in judged)),
        budgets=list(dict.fromkeys(row.budget for row in judged)),
        lengths=sorted({row.length for row in rows}),
        depths=sorted({row.depth for row in rows if row.depth is not None}),
    )


def _draw_panel(axes: Axes, frame: _Frame, rows: Sequence[Row], title: str) -> None:
    """One grid, the beginning of the text above; each field says how many of how many."""
    axes.set_visible(True)
    shares = [[_share(rows, length, depth) for length in frame.lengths] for depth in frame.depths]
    numbers = [[float("nan") if each is None else each.mean for each in line] for line in shares]
    axes.imshow(numbers, cmap=_COLOURS, vmin=0, vmax=1, aspect="auto")
    for y, line in enumerate(shares):
        for x, each in enumerate(line):
            if each is not None:
                axes.text(x, y, f"{each.right}/{each.count}", ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(frame.lengths)), [str(length) for length in frame.lengths])
    axes.set_yticks(range(len(frame.depths)), [f"{depth:.0%}" for depth in frame.depths])
    axes.tick_params(labelsize=7, length=0)
    axes.set_title(title, fontsize=8)


def _share(rows: Iterable[Row], length: int, depth: float) -> Share | None:
    own = [row for row in rows if (row.length, row.depth) == (length, depth)]
    return share_right(own) if own else None
