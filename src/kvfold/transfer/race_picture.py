"""A race as a picture: time to the first token by bandwidth, and by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvfold.transfer.entrant import AT_PRODUCER, OWN, STAGES, Entrant

_COLOURS = ("#3b3b3b", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def draw_race(entrants: Mapping[str, Entrant], bandwidths: Sequence[float], title: str) -> Figure:
    """Draw a race.

    Args:
        entrants: By subject.
        bandwidths: Bits a second that were measured.
        title: Above the panels.

    Returns:
        Two panels: seconds to the first token by bandwidth, when the producer has the prefix
        already, as lines by the stages' medians with the measured points and their range; and the
        stages of each subject at the middle bandwidth, the producer's included.
    """
    figure = Figure(figsize=(12, 5), layout="constrained")
    lines, bars = figure.subplots(1, 2)
    for index, (name, entrant) in enumerate(entrants.items()):
        _draw_line(lines, name, entrant, bandwidths, _COLOURS[index % len(_COLOURS)])
    lines.set(
        xscale="log",
        yscale="log",
        xlabel="bandwidth, Mbit/s",
        ylabel="seconds to the first token",
        title="the producer has read the prefix",
    )
    lines.legend(fontsize=8, frameon=False)
    lines.grid(color="#e6e6e6", linewidth=0.7)
    _draw_stages(bars, entrants, sorted(bandwidths)[len(bandwidths) // 2])
    figure.suptitle(title.replace("$", r"\$"))
    return figure


def _draw_line(
    axes: Axes, name: str, entrant: Entrant, bandwidths: Sequence[float], colour: str
) -> None:
    if name == OWN:
        axes.axhline(
            median(entrant.total(bandwidths[0], kept=True)),
            color=colour,
            linestyle="--",
            label=name,
        )
        return
    after = [s for stage, s in entrant.seconds.items() if stage not in AT_PRODUCER]
    rest = sum(median(samples) for samples in after)
    grid = np.geomspace(min(bandwidths) / 4, max(bandwidths) * 2, 100)
    axes.plot(grid / 1e6, 8 * entrant.payload / grid + rest, color=colour, label=name)
    for bandwidth in bandwidths:
        found = entrant.total(bandwidth, kept=True)
        middle = median(found)
        spread = [[middle - min(found)], [max(found) - middle]]
        axes.errorbar(
            bandwidth / 1e6, middle, spread, fmt="o", markersize=4, capsize=2, color=colour
        )


def _draw_stages(axes: Axes, entrants: Mapping[str, Entrant], bandwidth: float) -> None:
    names, left = list(entrants), np.zeros(len(entrants))
    for index, stage in enumerate([*STAGES[:2], "send", *STAGES[2:]]):
        widths = np.array([_stage(entrants[name], stage, bandwidth) for name in names])
        axes.barh(names, widths, left=left, color=_COLOURS[index % len(_COLOURS)], label=stage)
        left += widths
    axes.invert_yaxis()
    axes.set(
        xlabel="seconds", title=f"stages at {bandwidth / 1e6:g} Mbit/s, the producer's included"
    )
    axes.legend(fontsize=8, frameon=False)


def _stage(entrant: Entrant, stage: str, bandwidth: float) -> float:
    samples = entrant.sending.get(bandwidth) if stage == "send" else entrant.seconds.get(stage)
    return median(samples) if samples else 0.0
