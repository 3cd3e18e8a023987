"""The picture of a curve is a PNG in which the colours of its marks can be found."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from kvfold.errors import ArtifactError
from kvfold.training import Point, TrainingRecord, TrainingSettings, plot_curve
from kvfold.training.curve import draw

TRAIN, VALIDATION, BEST = "#0072b2", "#d55e00", "#00754f"


def record_of(steps: int) -> TrainingRecord:
    curve: list[Point] = [{"step": 0, "train": {}, "validation": {"kl$": 2.0, "never": None}}]
    for step in range(1, steps + 1):
        validation = {"kl$": 1.0 + abs(step - 30) / 50, "share": 0.5} if step % 10 == 0 else {}
        train = {"loss": 1 / step, "reward": None if step % 7 == 0 else -1.0, "kl$": 2 / step}
        curve.append({"step": step, "train": train, "validation": validation})
    return TrainingRecord(
        settings=TrainingSettings(steps=max(1, steps)),
        identity={},
        environment={},
        seconds=1.0,
        steps=steps,
        criterion="kl$",
        best_step=30 if steps else 0,
        best_metrics={"kl$": 1.0 if steps else 2.0},
        curve=curve,
    )


def drawn_panels(record: TrainingRecord, monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The figure that is drawn."""
    figures: list[Figure] = []

    def keep(**options: object) -> Figure:
        figures.append(Figure(**options))  # type: ignore[arg-type]
        return figures[-1]

    with monkeypatch.context() as patch:
        patch.setattr("kvfold.training.curve.Figure", keep)
        draw(record)
    return figures[0]


@pytest.mark.parametrize("steps", [0, 1, 40, 400])
def test_it_is_a_readable_png(tmp_path: Path, steps: int) -> None:
    path = tmp_path / "curve.png"
    plot_curve(record_of(steps), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    image = imread(io.BytesIO(content))
    assert image.shape[0] > 250
    assert image.shape[1] > 700
    for colour in (VALIDATION, BEST, *([TRAIN] if steps > 1 else [])):
        wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(image[..., :3] - wanted).max(-1) < 0.02).any(), colour
    assert [each.name for each in tmp_path.iterdir()] == ["curve.png"]


def test_one_panel_a_metric_the_criterion_first(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn_panels(record_of(400), monkeypatch)
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.axison}
    assert list(panels) == [r"kl\$", "loss", "reward", "share"]
    lines = {line.get_label(): line for line in panels["loss"].get_lines()}
    assert lines["step"].get_xdata().tolist() == list(range(1, 401))
    mean = lines["mean of 20"]
    assert mean.get_xdata()[0] == 20
    assert mean.get_ydata()[0] == pytest.approx(sum(1 / s for s in range(1, 21)) / 20)
    assert len(mean.get_xdata()) == 381
    lines = {line.get_label(): line for line in panels[r"kl\$"].get_lines()}
    assert lines["validation"].get_xdata().tolist() == list(range(0, 401, 10))
    assert lines["best"].get_xydata().tolist() == [[30.0, 1.0]]
    reward = {line.get_label(): line for line in panels["reward"].get_lines()}["step"]
    assert not any(step % 7 == 0 for step in reward.get_xdata())
    assert "lowest kl" in figure.get_suptitle()
    assert "1 after 30" in figure.get_suptitle()


def test_a_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot write"):
        plot_curve(replace(record_of(1), steps=2), tmp_path / "absent" / "curve.png")
