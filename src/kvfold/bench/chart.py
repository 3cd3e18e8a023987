"""A result as a picture: throughput with its spread, and cache bytes."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvfold.artifacts import MIB
from kvfold.bench.comparison import BenchResult, Comparison

COLOURS = ("#3b3b3b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, which the colour-blind can tell apart, after a grey."""


def draw(result: BenchResult) -> Figure:
    """Two panels a comparison: tokens a second, median with range, and bytes of the cache."""
    rows = len(result.comparisons)
    tallest = max(len(each.outcomes) for each in result.comparisons)
    figure = Figure(figsize=(9, rows * (0.8 + 0.35 * tallest) + 0.6), layout="constrained")
    panels = figure.subplots(rows, 2, squeeze=False)
    for each, (speed, size) in zip(result.comparisons, panels, strict=True):
        _draw_speed(speed, each, result.kind)
        _draw_size(size, each)
    figure.suptitle(f"{result.kind}, {result.settings.model}, {result.settings.dtype}")
    return figure


def _draw_speed(axes: Axes, comparison: Comparison, kind: str) -> None:
    spreads = [each.tokens_per_second for each in comparison.outcomes]
    medians = [spread.median for spread in spreads]
    below = [spread.median - spread.lowest for spread in spreads]
    above = [spread.highest - spread.median for spread in spreads]
    _bars(axes, comparison, medians, [below, above])
    axes.set_title(comparison.title, fontsize=10)
    axes.set_xlabel(f"{kind} tokens/s")


def _draw_size(axes: Axes, comparison: Comparison) -> None:
    _bars(axes, comparison, [o.last.cache_bytes / MIB for o in comparison.outcomes], None)
    axes.set_xlabel("cache MiB")


def _bars(
    axes: Axes, comparison: Comparison, widths: list[float], error: list[list[float]] | None
) -> None:
    names = [each.subject for each in comparison.outcomes]
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(names))]
    bars = axes.barh(names, widths, xerr=error, color=colours, capsize=3)
    axes.bar_label(bars, fmt="{:.3g}", padding=3, fontsize=8)
    axes.margins(x=0.15)
    axes.invert_yaxis()
