"""Pictures: what a calibration measured and fitted, and caches side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from kvfold.diffusion.calibrate import ENOUGH, Calibration
from kvfold.diffusion.race import Runner

_INK, _DRIFT, _CURVE, _RANK = "#222222", "#0072b2", "#d55e00", "#00754f"
_PARTS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00"),
    *("#56b4e9", "#f0e442", "#7f7f7f", "#4b0082"),
)


def draw_calibration(calibration: Calibration) -> Figure:
    """Drift by layer with the fitted curve on it, and the overlap by rank with the one chosen."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_drift(left, calibration)
    _draw_ranks(right, calibration)
    return figure


def draw_race(runners: Sequence[Runner], title: str) -> Figure:
    """Tokens a second, median with range, agreement with no cache, and where a step's time goes."""
    timed = any(runner.parts for runner in runners)
    height = 1.4 + 0.4 * len(runners) + (0.9 if timed else 0.0)
    figure = Figure(figsize=(14 if timed else 10, height), layout="constrained")
    speed, agreement, *rest = figure.subplots(1, 3 if timed else 2, sharey=True)
    names = [runner.name for runner in runners]
    spreads = [sorted(runner.tokens_per_second) for runner in runners]
    medians = [_median(spread) for spread in spreads]
    below = [middle - spread[0] for middle, spread in zip(medians, spreads, strict=True)]
    above = [spread[-1] - middle for middle, spread in zip(medians, spreads, strict=True)]
    bars = speed.barh(names, medians, xerr=[below, above], color=_DRIFT, capsize=3)
    speed.bar_label(bars, fmt="{:.3g}", padding=3, fontsize=8)
    speed.set_xlabel("new tokens/s, median and range of the rounds")
    shares = [100 * runner.agreement for runner in runners]
    bars = agreement.barh(names, shares, color=_CURVE)
    agreement.bar_label(bars, fmt="{:.1f}", padding=3, fontsize=8)
    agreement.set_xlabel("tokens equal to those of `none`, %")
    for axes in rest:
        _draw_parts(axes, runners)
    for axes in (speed, agreement):
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    speed.invert_yaxis()
    figure.suptitle(title.replace("$", r"\$"), fontsize=10, color=_INK)
    return figure


def _draw_parts(axes: Axes, runners: Sequence[Runner]) -> None:
    found = [runner.step_seconds for runner in runners]
    names, left = [runner.name for runner in runners], [0.0] * len(runners)
    for number, part in enumerate(dict.fromkeys(name for each in found for name in each)):
        widths = [1e3 * each.get(part, 0.0) for each in found]
        axes.barh(names, widths, left=left, color=_PARTS[number % len(_PARTS)], label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("milliseconds of a step, by part")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_drift(axes: Axes, calibration: Calibration) -> None:
    layers = range(len(calibration.drift))
    shares = calibration.curve.shares(len(calibration.drift))
    axes.plot(layers, calibration.drift, "o", color=_DRIFT, label="measured drift")
    axes.set_xlabel("layer")
    axes.set_ylabel("1 - cosine of values, step to step", color=_DRIFT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    other = axes.twinx()
    other.plot(layers, shares, "-", color=_CURVE, label="fitted budget")
    other.set_ylabel("share of tokens recomputed", color=_CURVE)
    if (scale := _scale(calibration.drift, shares)) > 0:
        # Logarithmic as the fit is, one scale above the other: the curve lies where it fits.
        seen = [*shares, *(each / scale for each in calibration.drift if each > 0)]
        for each, unit in ((axes, scale), (other, 1.0)):
            each.set_yscale("log")
            each.yaxis.set_major_formatter(StrMethodFormatter("{x:.2g}"))
            each.yaxis.set_minor_formatter(StrMethodFormatter("{x:.2g}"))
            each.set_ylim(unit * min(seen) / 1.3, unit * max(seen) * 1.3)
    axes.set_title(f"drift by layer, budget of mean {calibration.ratio:.0%}", fontsize=10)


def _draw_ranks(axes: Axes, calibration: Calibration) -> None:
    ranks = sorted(calibration.overlap)
    shares = [100 * calibration.overlap[rank] for rank in ranks]
    axes.plot(ranks, shares, "o-", color=_RANK)
    axes.axvline(calibration.rank, color=_CURVE, linestyle=":", label=f"chosen: {calibration.rank}")
    axes.axhline(100 * ENOUGH, color=_INK, linewidth=0.8, linestyle="--", label="enough")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rank of the proxies")
    axes.set_ylim(0, 103)
    axes.set_title("most drifted tokens that the proxies find, %", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def _scale(drift: Sequence[float], shares: Sequence[float]) -> float:
    """Drift for a share, the geometric mean over the layers; 0 where nothing drifts."""
    logs = [math.log(each / share) for each, share in zip(drift, shares, strict=True) if each > 0]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def _median(values: Sequence[float]) -> float:
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
