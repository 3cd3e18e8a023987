"""The picture of a segmentation is a PNG whose bars, marks and bands are those of its tokens."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import same_color, to_rgba
from matplotlib.figure import Figure
from matplotlib.image import imread

from kvfold.errors import ArtifactError, ConfigError
from kvfold.zoom.picture import SegmentedText, plot_segments
from kvfold.zoom.segment import anchor_threshold, anchors, segment

ANCHOR, SPAN, RAW, THRESHOLD = "#d55e00", "#0072b2", "#9a9a9a", "#00754f"
BANDS = ("#bad8ee", "#e2eef8")


def text_of(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Surprisal, anchors, spans and threshold of a random text."""
    surprisal = torch.rand(1, count, generator=torch.Generator().manual_seed(0)) ** 8 * 9
    tokens = torch.ones_like(surprisal, dtype=torch.bool)
    threshold = anchor_threshold(surprisal, tokens, 1.0)
    found = anchors(surprisal, tokens, threshold, sinks=2, most=None)
    span_of = segment(found, tokens, shortest=5, longest=10).span_of
    return surprisal[0], found[0], span_of[0], float(threshold)


def drawn(
    count: int,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    expanded: torch.Tensor | None = None,
) -> Figure:
    """The figure of a random text."""
    figures: list[Figure] = []

    def keep(**options: object) -> Figure:
        figures.append(Figure(**options))  # type: ignore[arg-type]
        return figures[-1]

    surprisal, found, span_of, threshold = text_of(count)
    words = [f" w{i}" for i in range(count)]
    with monkeypatch.context() as patch:
        patch.setattr("kvfold.zoom.picture.Figure", keep)
        plot_segments(
            SegmentedText(words, surprisal, found, span_of, threshold, expanded=expanded), path
        )
    return figures[0]


def shapes_of(panels: list[Axes], colour: str) -> list[np.ndarray]:
    """The corners `[count, 2]` of all that is filled with that colour."""
    return [
        np.asarray(path.vertices)
        for axes in panels
        for filled in axes.collections
        if isinstance(filled, PolyCollection)
        and np.allclose(filled.get_facecolor(), to_rgba(colour))
        for path in filled.get_paths()
    ]


def bars_of(panels: list[Axes], colour: str, count: int) -> np.ndarray:
    """The height of the bar of that colour at each position; -1 where there is none."""
    heights = np.full(count, -1.0)
    for corners in shapes_of(panels, colour):
        outline = corners[1 : (len(corners) - 1) // 2].reshape(-1, 4, 2)  # there, and back below
        heights[np.rint(outline[..., 0].mean(1)).astype(int)] = outline[..., 1].max(1)
    return heights


def banded(panels: list[Axes], colour: str, count: int) -> np.ndarray:
    """The positions in a band of that colour."""
    inside = np.zeros(count, dtype=bool)
    for corners in shapes_of(panels, colour):
        first, last = corners[:, 0].min(), corners[:, 0].max()
        inside[round(first + 0.5) : round(last + 0.5)] = True
    return inside


@pytest.mark.parametrize("count", [1, 50, 120, 121, 700, 8192])
def test_it_is_a_readable_png(tmp_path: Path, count: int):
    surprisal, found, span_of, threshold = text_of(count)
    words, path = ["word"] * count, tmp_path / "a.png"
    plot_segments(SegmentedText(words, surprisal, found, span_of, threshold), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    image = imread(io.BytesIO(content))
    assert 350 < image.shape[0] < 2000
    assert 700 < image.shape[1] < 2600
    for colour in (ANCHOR, *([SPAN, RAW, THRESHOLD, *BANDS] if count > 1 else [])):
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(image[..., :3] - wanted).max(-1) < 0.02).any(), colour
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize(("count", "lines"), [(50, 1), (256, 1), (700, 3), (3000, 8)])
def test_every_token_has_its_bar_its_mark_and_its_band(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, lines: int
):
    panels = drawn(count, tmp_path / "a.png", monkeypatch).axes
    *tensors, threshold = text_of(count)
    surprisal, found, span_of = (each.numpy() for each in tensors)
    assert len(panels) == lines
    inside = span_of >= 0
    for colour, chosen in ((ANCHOR, found), (SPAN, inside), (RAW, ~inside & ~found)):
        expected = np.where(chosen, surprisal, -1)
        np.testing.assert_allclose(bars_of(panels, colour, count), expected, rtol=1e-6)
    for parity, colour in enumerate(BANDS):
        assert (banded(panels, colour, count) == (inside & (span_of % 2 == parity))).all()
    marks = [np.asarray(axes.get_lines()[0].get_xdata()) for axes in panels]
    assert np.concatenate(marks).tolist() == np.flatnonzero(found).tolist()
    for axes in panels:
        assert np.asarray(axes.get_lines()[1].get_ydata()).tolist() == [threshold] * 2
    assert len({axes.get_ylim() for axes in panels}) == 1


def test_the_title_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    title = drawn(700, tmp_path / "a.png", monkeypatch).get_suptitle()
    _, found, span_of, _ = text_of(700)
    inside, spans = int((span_of >= 0).sum()), int(span_of.max()) + 1
    raw = 700 - int(found.sum()) - inside
    expected = f"{int(found.sum())} anchors, {inside} in {spans} spans, {raw} in no span"
    assert title == f"700 tokens: {expected}"


def test_texts_stand_below_a_short_text_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (axes,) = drawn(120, tmp_path / "a.png", monkeypatch).axes
    labels = axes.get_xticklabels()
    assert [each.get_text() for each in labels] == [f"·w{i}" for i in range(120)]
    found = text_of(120)[1].tolist()
    assert [same_color(each.get_color(), ANCHOR) for each in labels] == found
    (axes,) = drawn(121, tmp_path / "a.png", monkeypatch).axes
    assert not any("w" in each.get_text() for each in axes.get_xticklabels())


def test_any_text_and_any_surprisal_are_drawn(tmp_path: Path):
    words = ["$x_1", "$y", "\n", "日本", "\t", "\x00", "a" * 40, "�", "", "\\frac{"]
    values = torch.tensor([0.0, torch.inf, torch.nan, 1e30, 1.0, 1.0, 1.0, -1.0, 0.0, 3.0])
    none = torch.zeros(10, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nowhere, everywhere = none.long() - 1, torch.full((10,), torch.inf)
        plot_segments(SegmentedText(words, values, none, nowhere), tmp_path / "a.png")
        plot_segments(
            SegmentedText(words, everywhere, ~none, nowhere, torch.inf, torch.zeros(2, 0)),
            tmp_path / "b.png",
        )
    assert imread(tmp_path / "a.png").shape[0] > 350
    assert imread(tmp_path / "b.png").shape[0] > 350


@pytest.mark.parametrize("count", [50, 700])
def test_the_strip_below_shows_how_often_each_span_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
):
    _, _, span_of, _ = text_of(count)
    spans = int(span_of.max()) + 1
    expanded = torch.rand(3, spans, generator=torch.Generator().manual_seed(1)) / 2
    panels = drawn(count, tmp_path / "a.png", monkeypatch, expanded=expanded).axes[:-1]
    bars, strips = panels[::2], panels[1::2]
    assert [axes.get_xlim() for axes in strips] == [axes.get_xlim() for axes in bars]
    assert len({axes.images[0].get_clim() for axes in strips}) == 1
    heat = np.full((3, count), np.nan)
    for axes in strips:
        image = axes.images[0]
        left, right, bottom, top = image.get_extent()
        heat[:, round(left + 0.5) : round(right + 0.5)] = np.ma.filled(image.get_array(), np.nan)
        assert (bottom, top) == (2.5, -0.5), "the first layer is above"
    expected = np.where(span_of >= 0, expanded.numpy()[:, span_of], np.nan)
    np.testing.assert_allclose(heat, expected, rtol=1e-6)
    content = imread(tmp_path / "a.png")
    assert 350 < content.shape[0] < 2100
    words = [each.get_text() for each in strips[0].get_xticklabels()]
    assert ("·w0" in words) == (count == 50)


@pytest.mark.parametrize("count", [0, 3])
def test_other_numbers_of_tokens_are_refused(tmp_path: Path, count: int):
    values = torch.zeros(count)
    text = SegmentedText(["a"] * count, values, values.bool(), values.long()[1:])
    with pytest.raises(ConfigError, match=f"had {count}, {count}, {count} and "):
        plot_segments(text, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing_is_refused(tmp_path: Path):
    surprisal, found, span_of, _ = text_of(20)
    with pytest.raises(ArtifactError, match="cannot write"):
        text = SegmentedText(["a"] * 20, surprisal, found, span_of)
        plot_segments(text, tmp_path / "absent" / "a.png")
