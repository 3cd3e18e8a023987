"""Quality against bytes and against speed as a picture, with the frontier of the best."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, SymmetricalLogLocator

from kvfold.bench.chart import COLOURS
from kvfold.evaluation.fidelity_found import Fidelity
from kvfold.evaluation.fidelity_settings import FULL
from kvfold.evaluation.fidelity_tradeoff import Point, frontier, points
from kvfold.evaluation.statistics import Interval

_MARKERS = "osD^vPX"
_FULL_MARKER = "*"
_GREY = "#9a9a9a"
_STEPS = (1, 2, 5)
"""Of every decade, what has a tick."""
_APART = 0.02
"""From one method to the next at one budget, as a share of their bytes."""

Known = tuple[float, float, float]
"""A number with its lower and upper bound."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """What is drawn along one direction."""

    label: str
    of: Callable[[Point], Known | None]
    more_is_better: bool


@dataclass(frozen=True, slots=True)
class _Key:
    """How points are told apart."""

    methods: list[str]
    budgets: list[str]

    def colour(self, method: str) -> str:
        return COLOURS[0] if method == FULL else COLOURS[1 + self.methods.index(method) % 6]

    def shift(self, method: str) -> float:
        """A factor that sets methods apart that hold as many bytes."""
        if method == FULL:
            return 1.0
        return 1 + _APART * (self.methods.index(method) - (len(self.methods) - 1) / 2)

    def marker(self, point: Point) -> str:
        if point.method == FULL:
            return _FULL_MARKER
        return _MARKERS[self.budgets.index(point.budget) % len(_MARKERS)]


def _kl(point: Point) -> Known | None:
    return _known(point.kl)


def _score(point: Point) -> Known | None:
    return _known(point.score)


def _known(interval: Interval | None) -> Known | None:
    return None if interval is None else (interval.mean, interval.low, interval.high)


def _bytes(point: Point) -> Known | None:
    return point.bytes_fast, point.bytes_fast, point.bytes_fast


def _speed(point: Point) -> Known | None:
    speed = point.speed
    return None if speed is None else (speed.median, speed.lowest, speed.highest)


_QUALITIES = (
    _Axis("KL to full, nats", _kl, more_is_better=False),
    _Axis("score of answers", _score, more_is_better=True),
)
_COSTS = (
    _Axis("fast bytes, share of a full cache's", _bytes, more_is_better=False),
    _Axis("decode tokens/s, times the full cache's", _speed, more_is_better=True),
)


def draw_tradeoff(fidelity: Fidelity) -> bytes:
    """Draw the quality of every method and budget against its bytes and its speed.

    Args:
        fidelity: What was found.

    Returns:
        A PNG file.
    """
    found = points(fidelity.rows, seed=fidelity.settings.seed)
    qualities = [axis for axis in _QUALITIES if any(map(axis.of, found))]
    costs = [axis for axis in _COSTS if any(map(axis.of, found))]
    judged = [point for point in found if point.method != FULL]
    key = _Key(
        list(dict.fromkeys(point.method for point in judged)),
        list(dict.fromkeys(point.budget for point in judged)),
    )
    size = (0.6 + 4.6 * len(costs), 1.6 + 3.2 * len(qualities))
    figure = Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(len(qualities), len(costs), squeeze=False, sharey="row", sharex="col")
    for line, quality in zip(panels, qualities, strict=True):
        for axes, cost in zip(line, costs, strict=True):
            _draw_panel(axes, found, cost, quality, key)
        _scale(line, quality, found)
        line[0].set_ylabel(f"{quality.label}, up is better")
    for axes, cost in zip(panels[-1], costs, strict=True):
        axes.set_xlabel(f"{cost.label}, {'right' if cost.more_is_better else 'left'} is better")
        if not cost.more_is_better:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=_STEPS))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(handles=_legend(key), loc="outside right upper", fontsize=8, frameon=False)
    samples = len({(row.set, row.length, row.index) for row in fidelity.rows})
    figure.suptitle(
        f"Quality against bytes and speed: {fidelity.subject.model}, {samples} samples\n"
        "95 % intervals; speed by the way, median and range, not a benchmark\n"
        "methods are set apart a little along their bytes",
        fontsize=9,
    )
    image = io.BytesIO()
    canvas.print_png(image)
    return image.getvalue()


def _draw_panel(axes: Axes, found: Sequence[Point], cost: _Axis, quality: _Axis, key: _Key) -> None:
    known = [
        (point, x, y)
        for point in found
        if (x := cost.of(point)) is not None and (y := quality.of(point)) is not None
    ]
    best = _best([(x[0], y[0]) for _, x, y in known], cost, quality)
    for place, (point, x, y) in enumerate(known):
        colour = key.colour(point.method)
        axes.errorbar(
            *([x[0] * (1 if cost.more_is_better else key.shift(point.method))], [y[0]]),
            xerr=_error(x),
            yerr=_error(y),
            fmt=key.marker(point),
            color=colour,
            markerfacecolor=colour if place in best else "white",
            markersize=11 if point.method == FULL else 6,
            elinewidth=0.7,
            capsize=2,
            alpha=0.85,
        )
    stairs = [(known[place][1][0], known[place][2][0]) for place in best]
    axes.step(*zip(*stairs, strict=True), where="post", color=_GREY, linewidth=1.2, zorder=1)
    axes.grid(color="#ececec", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _best(places: Sequence[tuple[float, float]], cost: _Axis, quality: _Axis) -> list[int]:
    """The points that no other beats."""
    x = [-x if cost.more_is_better else x for x, _ in places]
    y = [y if quality.more_is_better else -y for _, y in places]
    return frontier(x, y)


def _scale(line: Sequence[Axes], quality: _Axis, found: Sequence[Point]) -> None:
    """Make the quality of a row of panels readable: shares as they are, distances by decades."""
    if quality.more_is_better:
        line[0].set_ylim(-0.04, 1.06)
        return
    known = [kl for point in found if (kl := quality.of(point)) is not None]
    least = min((middle for middle, _, _ in known if middle > 0), default=1.0)
    threshold = 10 ** math.floor(math.log10(least))
    line[0].set_yscale("symlog", linthresh=threshold, linscale=0.4)
    line[0].set_ylim(1.2 * max(threshold, *(high for _, _, high in known)), -0.3 * threshold)
    locator = SymmetricalLogLocator(base=10, linthresh=threshold, subs=_STEPS)
    line[0].yaxis.set_major_locator(locator)
    line[0].yaxis.set_minor_locator(NullLocator())
    line[0].yaxis.set_major_formatter("{x:g}")


def _error(known: Known) -> list[list[float]]:
    middle, low, high = known
    return [[max(middle - low, 0)], [max(high - middle, 0)]]


def _legend(key: _Key) -> list[Line2D]:
    return [
        _dot(FULL, _FULL_MARKER, COLOURS[0]),
        *(_dot(method, "o", key.colour(method)) for method in key.methods),
        *(
            _dot(f"budget {budget}", _MARKERS[place % len(_MARKERS)], _GREY)
            for place, budget in enumerate(key.budgets)
        ),
        Line2D([], [], color=_GREY, label="frontier,\nits points filled"),
    ]


def _dot(label: str, marker: str, colour: str) -> Line2D:
    return Line2D([], [], marker=marker, color=colour, linestyle="none", label=label)
