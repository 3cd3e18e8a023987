"""A text as SeKV sees it: how much each token was not expected, the anchors and the spans."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from kvfold.artifacts import write_whole
from kvfold.errors import ConfigError

_INK, _PALE = "#222222", "#6e6e6e"
_ANCHOR, _SPAN, _RAW, _THRESHOLD = "#d55e00", "#0072b2", "#9a9a9a", "#00754f"
_BANDS = ("#bad8ee", "#e2eef8")
"""Behind spans of even and of odd number."""
_NAMED = 120
"""A text of at most so many tokens has them written below."""
_LETTERS = 14
"""Of a token's text at most."""
_EXPLANATION = (
    "Tokens that the model did not expect, and the first ones, are anchors; the runs between them, "
    "unless short, are cut into spans."
)
_LINE, _LINES = 256, 8
"""Tokens of a line at least, and lines at most, of a longer text."""
_HEAT = "magma_r"
"""Colours of how often spans are expanded, from pale to dark."""
_HEAT_LABEL = "how often a span is expanded,\nshare of queries and kv heads"


@dataclass(frozen=True, slots=True, eq=False)
class SegmentedText:
    """One text of N tokens and what becomes of them."""

    tokens: Sequence[str]
    """N texts."""
    surprisal: torch.Tensor
    """In nats, `[N]`."""
    anchors: torch.Tensor
    """True for anchors, `[N]`."""
    span_of: torch.Tensor
    """Number of each token's span, `[N]`; -1 for a token in none."""
    threshold: float | None = None
    """Nats above which a token is an anchor, drawn as a line."""
    expanded: torch.Tensor | None = None
    """Share of queries that expand each span, by layer, `[L, S]`, drawn below the surprisal."""


def plot_segments(text: SegmentedText, path: str | Path) -> None:
    """Draw the surprisal of one text over its tokens, with its anchors and spans.

    Args:
        text: What is drawn.
        path: The PNG file; one that is there is replaced.

    Raises:
        ConfigError: When there are no tokens, or not one value for each.
        ArtifactError: When the file cannot be written.

    Example:
        >>> text = SegmentedText(words, surprisal, anchors, span_of)  # doctest: +SKIP
        >>> plot_segments(text, "text.png")  # doctest: +SKIP
    """
    values = (text.surprisal, text.anchors, text.span_of)
    lengths = (len(text.tokens), *(each.numel() for each in values))
    if len(set(lengths)) > 1 or not lengths[0]:
        raise ConfigError(
            "tokens, surprisal, anchors and span_of had {}, {}, {} and {} entries: give as many of "
            "each, and one at least".format(*lengths)
        )
    image = _Picture(text).draw()
    write_whole(Path(path), lambda temporary: temporary.write_bytes(image))


class _Picture:
    """What is drawn, as arrays `[N]`; the heat as `[L, N]`."""

    def __init__(self, text: SegmentedText) -> None:
        self.tokens, threshold = text.tokens, text.threshold
        self.anchors = text.anchors.detach().cpu().numpy().astype(bool)
        self.span_of = text.span_of.detach().cpu().numpy()
        self.threshold = threshold
        self.heat = None if text.expanded is None else _heat(text.expanded, self.span_of)
        nats = text.surprisal.detach().float().cpu().numpy()
        values = np.nan_to_num(nats, nan=0.0, posinf=np.inf)
        finite = values[np.isfinite(values)]
        line = threshold if threshold is not None and math.isfinite(threshold) else 0.0
        self.top = 1.12 * max(finite.max(initial=0.0), line, 0.1)
        self.heights = values.clip(0, self.top)

    def draw(self) -> bytes:
        """A PNG file."""
        count = len(self.tokens)
        lines = 1 if count <= _NAMED else min(_LINES, math.ceil(count / _LINE))
        length = math.ceil(count / lines)
        named = count <= _NAMED
        strip = 0.0 if self.heat is None else 1.4 if named else 0.7
        height = (4.6 if named else 2 + 1.45 * lines) + strip * lines
        narrowest = 7.5 if self.heat is None else 9
        size = (max(narrowest, 2 + 0.155 * count) if named else 17, height)
        figure = Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")
        canvas = FigureCanvasAgg(figure)
        panels = self._draw_lines(figure, lines, length)
        panels[0].set_title(_EXPLANATION, loc="left", fontsize=9, color=_PALE)
        panels[-1].set_xlabel("tokens" if named else "position of the token in the text")
        figure.supylabel("surprisal in nats", fontsize=10, color=_INK)
        figure.suptitle(self._title(), fontsize=12, color=_INK, weight="bold")
        columns = 6 if size[0] > 12 else 3
        place = {"loc": "outside lower center", "ncols": columns}
        figure.legend(handles=self._legend(), fontsize=9, frameon=False, **place)
        image = io.BytesIO()
        canvas.print_png(image)
        return image.getvalue()

    def _draw_lines(self, figure: Figure, lines: int, length: int) -> list[Axes]:
        """Draw all tokens, and below each line of them the heat, if there is any."""
        starts = [index * length for index in range(lines)]
        if self.heat is None:
            panels = list(figure.subplots(lines, 1, squeeze=False)[:, 0])
            for axes, start in zip(panels, starts, strict=True):
                self._draw_line(axes, start, length)
                self._name_tokens(axes)
            return panels
        ratios = [3, 1] * lines if len(self.tokens) <= _NAMED else [2, 1] * lines
        panels = list(figure.subplots(2 * lines, 1, height_ratios=ratios))
        norm = Normalize(0, max(float(np.nanmax(self.heat, initial=0.0)), 1e-3))
        for bars, strip, start in zip(panels[::2], panels[1::2], starts, strict=True):
            self._draw_line(bars, start, length)
            self._draw_heat(strip, self.heat[:, start : start + length], start, norm)
            strip.set_xlim(bars.get_xlim())
            bars.tick_params(labelbottom=False)
            self._name_tokens(strip)
        mappable = ScalarMappable(norm, _HEAT)
        bar = figure.colorbar(mappable, ax=panels, label=_HEAT_LABEL, shrink=0.7, pad=0.01)
        bar.ax.tick_params(labelsize=8, color=_PALE)
        return panels

    def _draw_heat(self, axes: Axes, heat: np.ndarray, start: int, norm: Normalize) -> None:
        """How often the span of each token is expanded, a row a layer; white where it is in none.

        Args:
            axes: Where.
            heat: `[L, n]`.
            start: Position of the first token.
            norm: From shares to colours.
        """
        layers, count = heat.shape
        if count:
            place = (start - 0.5, start + count - 0.5, layers - 0.5, -0.5)
            axes.imshow(
                heat, cmap=_HEAT, norm=norm, aspect="auto", extent=place, interpolation="nearest"
            )
        axes.set_ylim(layers - 0.5, -0.5)
        axes.set_yticks([0, layers - 1] if layers > 1 else [0])
        axes.set_ylabel("layer", fontsize=8, color=_PALE)
        axes.tick_params(labelsize=8, color=_PALE)

    def _title(self) -> str:
        inside, spans = int((self.span_of >= 0).sum()), int(self.span_of.max()) + 1
        anchors = int(self.anchors.sum())
        raw = len(self.tokens) - anchors - inside
        return (
            f"{_some(len(self.tokens), 'token')}: {_some(anchors, 'anchor')}, "
            f"{inside:,} in {_some(spans, 'span')}, {raw:,} in no span"
        )

    def _legend(self) -> list[Artist]:
        handles: list[Artist] = [
            Patch(color=_ANCHOR, label="anchor: kept as it is"),
            Patch(color=_RAW, label="in no span: kept as it is"),
            Patch(color=_SPAN, label="in a span"),
            Patch(color=_BANDS[0], label="one span"),
            Patch(color=_BANDS[1], label="the next span"),
        ]
        if self.threshold is not None:
            label = f"threshold, {self.threshold:.2f} nats"
            handles.append(Line2D([], [], color=_THRESHOLD, ls="--", lw=0.9, label=label))
        return handles

    def _draw_line(self, axes: Axes, start: int, length: int) -> None:
        """The tokens from `start`, in a panel of `length` tokens."""
        part = slice(start, start + length)
        heights, span_of, anchors = self.heights[part], self.span_of[part], self.anchors[part]
        for parity, colour in enumerate(_BANDS):
            axes.broken_barh(_bands(span_of, parity, start), (0, self.top), color=colour, lw=0)
        inside = span_of >= 0
        kinds = ((inside, _SPAN), (~inside & ~anchors, _RAW), (anchors, _ANCHOR))
        for chosen, colour in kinds:
            places = np.flatnonzero(chosen)
            gap = 0.2 if length <= _LINE else 0.0
            _draw_bars(axes, start + places, heights[places], colour, gap=gap)
        places = start + np.flatnonzero(anchors)
        size = 5 if length <= _NAMED else 3.5 if length <= _LINE else 2.5
        axes.plot(places, heights[anchors] + 0.05 * self.top, "v", ms=size, color=_ANCHOR, lw=0)
        if self.threshold is not None:
            axes.axhline(self.threshold, color=_THRESHOLD, linewidth=0.9, linestyle="--")
        self._style(axes, start, length)

    def _style(self, axes: Axes, start: int, length: int) -> None:
        axes.set_xlim(start - 0.7, start + length - 0.3)
        axes.set_ylim(0, self.top * 1.08)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, color=_PALE)

    def _name_tokens(self, axes: Axes) -> None:
        """Write the tokens of a short text below."""
        if len(self.tokens) <= _NAMED:
            names = _readable(self.tokens)
            axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
            for label, anchor in zip(axes.get_xticklabels(), self.anchors, strict=True):
                label.set_color(_ANCHOR if anchor else _INK)


def _heat(expanded: torch.Tensor, span_of: np.ndarray) -> np.ndarray:
    """The share of each token's span by layer, `[L, N]`; NaN for a token in no span."""
    shares = expanded.detach().float().cpu().numpy()
    shares = np.concatenate([shares, np.full((len(shares), 1), np.nan)], axis=1)
    return shares[:, np.where(span_of >= 0, span_of, -1)]


def _some(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _draw_bars(
    axes: Axes, places: np.ndarray, heights: np.ndarray, colour: str, *, gap: float
) -> None:
    """Bars of width 1 - gap, as one polygon: thousands of patches would take seconds."""
    edge = (1 - gap) / 2
    outline = places[:, None] + np.array([-edge, -edge, edge, edge])
    levels = heights[:, None] * np.array([0, 1, 1, 0])
    axes.fill_between(outline.flatten(), levels.flatten(), color=colour, lw=0)


def _bands(span_of: np.ndarray, parity: int, start: int) -> list[tuple[float, float]]:
    """First place and width of each stretch of tokens in spans of one parity."""
    chosen = (span_of >= 0) & (span_of % 2 == parity)
    edges = np.flatnonzero(np.diff(chosen.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [(start + first - 0.5, float(end - first)) for first, end in edges]


def _readable(tokens: Sequence[str]) -> list[str]:
    """Texts on one line, with spaces to be seen and without what the font cannot write."""
    known = get_font(findfont(FontProperties())).get_charmap()
    texts = [text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·") for text in tokens]
    texts = [text if len(text) <= _LETTERS else text[: _LETTERS - 1] + "…" for text in texts]
    texts = ["".join(c if ord(c) in known else "□" for c in text) for text in texts]
    return [text.replace("$", r"\$") for text in texts]
