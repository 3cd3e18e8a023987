"""A calibration as a picture: payload, sensitivity, and how errors grow over the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_INK, _BLUE, _ORANGE, _GREEN = "#3b3b3b", "#0072b2", "#d55e00", "#009e73"


def draw_calibration(record: Mapping[str, object], title: str) -> Figure:
    """Draw what a calibration recorded.

    Args:
        record: Of a codec.
        title: Above the panels.

    Returns:
        Four panels: divergence by payload; what restoring each layer takes off it; errors of
        the states of each layer; errors of what each layer is given, with and without patches.
    """
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 2).flatten()
    known = cast("Mapping[str, Any]", record)
    _draw_payload(panels[0], known)
    _draw_sensitivity(panels[1], known)
    _draw_errors(panels[2], known)
    _draw_growth(panels[3], known)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6", linewidth=0.7)
        axes.set_axisbelow(True)
    figure.suptitle(title.replace("$", r"\$"))
    return figure


def _draw_payload(axes: Axes, record: Mapping[str, Any]) -> None:
    curve = record.get("curve", [])
    if curve:
        shares, found = zip(*curve, strict=True)
        axes.plot(shares, found, "o-", color=_BLUE, label="before the decoders' refit")
    chosen = record["payload"], record["divergence_chosen_by"]
    axes.plot(*chosen, "*", markersize=13, color=_GREEN, label="the codec, texts chosen by")
    held = record["payload"], record["divergence"]
    axes.plot(*held, "s", color=_ORANGE, label="the codec, other texts")
    axes.set(title="divergence by payload", xlabel="share of raw bfloat16", ylabel="KL, nats")
    # Identical models leave nothing that a logarithm could show.
    values = [chosen[1], held[1], *(point[1] for point in curve)]
    if min(values) > 0:
        axes.set_yscale("log")
    axes.legend(fontsize=8, frameon=False)


def _draw_sensitivity(axes: Axes, record: Mapping[str, Any]) -> None:
    axes.set(
        title="sensitivity: what restoring a layer takes off", xlabel="layer", ylabel="KL, nats"
    )
    gains, patched = record.get("sensitivity", []), set(record["patched"])
    if not gains:
        axes.text(0.5, 0.5, "not measured without patches", ha="center", transform=axes.transAxes)
        return
    colours = [_ORANGE if layer in patched else _BLUE for layer in range(len(gains))]
    axes.bar(range(len(gains)), gains, color=colours)
    if patched:
        axes.plot([], [], "s", color=_ORANGE, label="patched")
        axes.legend(fontsize=8, frameon=False)


def _draw_errors(axes: Axes, record: Mapping[str, Any]) -> None:
    for index, (name, colour) in enumerate((("keys", _BLUE), ("values", _ORANGE))):
        shares = [pair[index] for pair in record["errors"]]
        axes.plot(shares, "o-", markersize=3, color=colour, label=name)
    axes.set(title="errors of decoded states", xlabel="layer", ylabel="share of the variance")
    axes.legend(fontsize=8, frameon=False)


def _draw_growth(axes: Axes, record: Mapping[str, Any]) -> None:
    colours = {"as made": _GREEN, "without patches": _INK}
    for name, errors in record.get("growth", {}).items():
        axes.plot(errors, "o-", markersize=3, color=colours.get(name, _BLUE), label=name)
    for layer in record["patched"]:
        axes.axvline(layer, color=_ORANGE, linewidth=0.7, linestyle=":")
    axes.set(
        title="error of what a layer is given (Lemma 5.1)",
        xlabel="layer",
        ylabel="relative error",
    )
    axes.legend(fontsize=8, frameon=False)
