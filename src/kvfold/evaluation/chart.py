"""A comparison as one picture: what each method saves, what it gains and what it costs."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvfold.artifacts import MIB
from kvfold.bench.chart import COLOURS
from kvfold.evaluation.results import Comparison, Divergence, MethodResult
from kvfold.evaluation.statistics import Interval

_MARKERS = "osD^vPX"
_INK, _PALE, _RIGHT, _WRONG = "#222222", "#8a8a8a", "#00754f", "#b3460a"
_ROOM_FOR_NAMES = 0.4
"""Height above the highest point, as a share of the height below it."""


def draw(comparison: Comparison) -> bytes:
    """Draw a comparison.

    Args:
        comparison: What was found.

    Returns:
        A PNG file.
    """
    results = comparison.results
    layout = ConstrainedLayoutEngine(rect=(0.01, 0.01, 0.98, 0.89), hspace=0.06, wspace=0.05)
    figure = Figure(figsize=(13, 8.6), dpi=130, facecolor="white", layout=layout)
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, width_ratios=(1.5, 1, 1), height_ratios=(1.6, 1))
    _draw_distance(figure.add_subplot(grid[0, 0]), results)
    _draw_bytes(figure.add_subplot(grid[0, 1]), results)
    _draw_speed(figure.add_subplot(grid[0, 2]), results)
    _draw_answers(figure.add_subplot(grid[1, :]), comparison)
    _write_heading(figure, comparison)
    image = io.BytesIO()
    canvas.print_png(image)
    return image.getvalue()


def _write_heading(figure: Figure, comparison: Comparison) -> None:
    subject, settings = comparison.subject, comparison.settings
    title = f"The same {subject.prompt_tokens:,}-token prompt, answered from smaller KV caches"
    cut = "after" if settings.protocol == "query-aware" else "before"
    facts = (
        f"{subject.model} model, {subject.dtype} on {subject.device}; budget {settings.budget} for "
        f"all but full; caches cut {cut} the question is read ({settings.protocol})"
    )
    figure.text(0.02, 0.955, title, size=17, weight="bold", color=_INK)
    figure.text(0.02, 0.922, facts, size=10.5, color=_PALE)


def _draw_distance(axes: Axes, results: Sequence[MethodResult]) -> None:
    """KL against bytes; whatever is at no distance, as `full`, stands on the axis."""
    better = "lower left is better; mean and 95 % interval"
    _style(axes, "Distance to the full cache", better)
    pairs = [(result, _distance(result)) for result in results]
    found = [(result, distance) for result, distance in pairs if distance is not None]
    if not found:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no tokens to measure it on", ha="center", color=_PALE)
        return
    _set_scales(axes, [distance.kl for _, distance in found], results)
    places = _side_by_side([_mib(result) for result, _ in found], axes.get_xlim()[1])
    for place, (result, distance) in zip(places, found, strict=True):
        _draw_point(axes, place, distance.kl, result, results.index(result))
    axes.set_ylabel(f"KL(full || method) in nats, {_what(results, found[0][1].kl.count)}")


def _draw_point(axes: Axes, place: float, kl: Interval, result: MethodResult, index: int) -> None:
    lowest, colour = axes.get_ylim()[0], _colour(result, index)
    height, top = max(kl.mean, lowest), max(kl.high, lowest)
    axes.errorbar(
        [place], [height], yerr=[[height - max(kl.low, lowest)], [top - height]],
        fmt=_MARKERS[index % len(_MARKERS)], markersize=9, color=colour, elinewidth=1.2,
        capsize=3 if kl.mean > 0 else 0, clip_on=False, zorder=3,
    )  # fmt: skip
    axes.annotate(
        result.method + ("" if kl.mean > 0 else ": 0"), (place, top), (0, 9),
        textcoords="offset points", rotation=90, ha="center", va="bottom", size=10.5,
        color=colour, weight="bold",
    )  # fmt: skip


def _set_scales(axes: Axes, distances: list[Interval], results: Sequence[MethodResult]) -> None:
    """Scale the axes so that all points and their names have room."""
    positive = [kl.mean for kl in distances if kl.mean > 0] or [0.1]
    lowest = min([*positive, *(kl.low for kl in distances if kl.low > 0)]) / 2.5
    axes.set_yscale("log")
    highest = max([*positive, *(kl.high for kl in distances)])
    axes.set_ylim(lowest, highest * (highest / lowest) ** _ROOM_FOR_NAMES)
    decades = math.log10(highest / lowest)
    steps = (1.0, 2.0, 5.0) if decades < 3 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0, max(map(_mib, results)) * 1.25)
    axes.set_xlabel("KV cache in MiB (close markers stand side by side)")
    axes.grid(axis="both", color="#e6e6e6", linewidth=0.8)


def _side_by_side(places: list[float], width: float) -> list[float]:
    """Move markers of nearly the same size apart, around where they stand."""
    step, moved = 0.042 * width, list(places)
    order = sorted(range(len(places)), key=lambda index: places[index])
    while order:
        group = [index for index in order if places[index] - places[order[0]] < step]
        middle = sum(places[index] for index in group) / len(group)
        first = max(middle - (len(group) - 1) / 2 * step, min(step, middle))
        for rank, index in enumerate(sorted(group)):
            moved[index] = first + rank * step
        order = order[len(group) :]
    return moved


def _distance(result: MethodResult) -> Divergence | None:
    return result.on_continuation or result.on_answer


def _what(results: Sequence[MethodResult], count: int) -> str:
    held_out = any(result.on_continuation for result in results)
    return f"{count} {'held-out' if held_out else 'answer'} tokens"


def _draw_bytes(axes: Axes, results: Sequence[MethodResult]) -> None:
    _style(axes, "Cache size after the prompt", "shorter is better")
    fast = [result.report.bytes_fast / MIB for result in results]
    slow = [result.report.bytes_slow / MIB for result in results]
    rows, colours = range(len(results)), [_colour(r, i) for i, r in enumerate(results)]
    axes.barh(rows, fast, color=colours, height=0.62)
    axes.barh(rows, slow, left=fast, color="white", edgecolor=colours, hatch="////", height=0.62)
    for row, result in enumerate(results):
        text = f" {_mib(result):.1f} MiB, {result.share_of_full:.0%}"
        axes.text(fast[row] + slow[row], row, text, va="center", size=10, color=_INK)
    axes.set_xlabel("MiB" + ("; hatched: slow tier" if any(slow) else ""))
    _name_rows(axes, results, max(map(_mib, results)) * 1.55)


def _draw_speed(axes: Axes, results: Sequence[MethodResult]) -> None:
    count = len(results[0].tokens_per_second.samples)
    _style(axes, "Decode speed", f"longer is better; median and range of {count} rounds")
    rates = [result.tokens_per_second for result in results]
    ends = [[r.median - r.lowest for r in rates], [r.highest - r.median for r in rates]]
    colours = [_colour(r, i) for i, r in enumerate(results)]
    axes.barh(
        range(len(results)),
        [r.median for r in rates],
        xerr=ends,
        color=colours,
        height=0.62,
        error_kw={"elinewidth": 1.2, "capsize": 3, "ecolor": _PALE},
    )
    for row, (rate, result) in enumerate(zip(rates, results, strict=True)):
        text = f"  {rate.median:.1f}, {result.times_full.median:.2f}x"
        axes.text(rate.highest, row, text, va="center", size=10, color=_INK)
    axes.set_xlabel("tokens/s, and as a multiple of full")
    _name_rows(axes, results, max(rate.highest for rate in rates) * 1.5)


def _name_rows(axes: Axes, results: Sequence[MethodResult], width: float) -> None:
    axes.set_yticks(range(len(results)), [result.method for result in results])
    axes.invert_yaxis()
    axes.set_xlim(0, width)
    axes.tick_params(axis="y", length=0, labelsize=10.5)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)


def _draw_answers(axes: Axes, comparison: Comparison) -> None:
    expected = comparison.subject.document.expected
    question = _plain(" ".join(comparison.subject.document.question.split()))
    right = f"right: {expected}" if expected is not None else "no right answer is known"
    _style(axes, f"Answers to: {textwrap.shorten(question, 90, placeholder=' ...')}", right)
    axes.set_axis_off()
    count = len(comparison.results)
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlim(0, 1)
    for row, result in enumerate(comparison.results):
        word, colour = _verdict(result)
        axes.text(0.0, row, word, color=colour, weight="bold", size=10.5, va="center")
        method = {"color": _colour(result, row), "weight": "bold", "size": 10.5, "va": "center"}
        axes.text(0.075, row, result.method, **method)
        answer = textwrap.shorten(result.answer_line, 115, placeholder=" ...")
        axes.text(0.17, row, _plain(answer), color=_INK, size=10.5, va="center")


def _verdict(result: MethodResult) -> tuple[str, str]:
    if result.is_right is None:
        return "", _INK
    return ("right", _RIGHT) if result.is_right else ("wrong", _WRONG)


def _style(axes: Axes, title: str, better: str) -> None:
    axes.set_title(title, loc="left", size=12.5, weight="bold", color=_INK, pad=22)
    axes.text(0, 1.02, better, transform=axes.transAxes, size=10, color=_PALE, va="bottom")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#bdbdbd")
    axes.tick_params(colors=_INK, labelsize=9.5)
    axes.set_axisbelow(True)


def _colour(result: MethodResult, index: int) -> str:
    """The first of the palette for `full`, wherever it stands."""
    return COLOURS[0] if result.method == "full" else COLOURS[1 + (index - 1) % (len(COLOURS) - 1)]


def _plain(text: str) -> str:
    """The text without the dollar signs that would start a formula."""
    return text.replace("$", r"\$")


def _mib(result: MethodResult) -> float:
    return (result.report.bytes_fast + result.report.bytes_slow) / MIB
