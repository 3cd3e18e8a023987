"""An evaluation of fidelity as a picture: KL by method and budget, one panel a set."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvfold.bench.chart import COLOURS
from kvfold.evaluation.fidelity_report import Report, Summary
from kvfold.evaluation.fidelity_settings import FULL

_MARKERS = "osD^vPX"
_SPREAD = 0.22
"""Between two budgets of one method, in rows."""


def draw(report: Report) -> bytes:
    """Draw a report.

    Args:
        report: An evaluation with its statistics.

    Returns:
        A PNG file.
    """
    sets = report.fidelity.settings.sets
    judged = [each for each in report.summaries if each.method != FULL]
    methods = list(dict.fromkeys(each.method for each in judged))
    budgets = list(dict.fromkeys(each.budget for each in judged))
    size = (1.6 + 3.6 * len(sets), 1.8 + 0.45 * len(methods))
    figure = Figure(figsize=size, dpi=130, facecolor="white", layout="constrained")
    canvas = FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sets), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, sets, strict=True):
        own = [each for each in judged if each.group == name]
        _draw_panel(axes, own, methods, budgets)
        axes.set_title(f"{name}, {own[0].samples} samples", fontsize=10)
    panels[0].set_yticks(range(len(methods)), methods)
    panels[0].set_ylim(len(methods) - 0.5, -0.5)
    if len(budgets) > 1:
        panels[-1].legend(title="budget", fontsize=8, title_fontsize=8)
    subject = report.fidelity.subject
    figure.suptitle(f"KL to the full cache: {subject.model}, left is better, 95 % intervals")
    image = io.BytesIO()
    canvas.print_png(image)
    return image.getvalue()


def _draw_panel(
    axes: Axes, summaries: Sequence[Summary], methods: list[str], budgets: list[str]
) -> None:
    for index, budget in enumerate(budgets):
        shift = (index - (len(budgets) - 1) / 2) * _SPREAD
        found = [(each, each.kl) for each in summaries if each.budget == budget]
        known = [(each, kl) for each, kl in found if kl is not None]
        axes.errorbar(
            [kl.mean for _, kl in known],
            [methods.index(each.method) + shift for each, _ in known],
            xerr=[
                [max(kl.mean - kl.low, 0) for _, kl in known],
                [max(kl.high - kl.mean, 0) for _, kl in known],
            ],
            fmt=_MARKERS[index % len(_MARKERS)],
            color=COLOURS[1 + index % (len(COLOURS) - 1)],
            capsize=3,
            label=budget,
        )
    axes.set_xlim(left=0)
    axes.set_xlabel("nats")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
