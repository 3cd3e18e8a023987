"""Files of a result: whole, or not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvfold.bench import DecodeSettings, bench_decode, output
from kvfold.bench.chart import draw
from kvfold.bench.comparison import BenchResult
from kvfold.errors import ArtifactError
from tests.bench.fakes import FakeRunner, silent


@pytest.fixture
def result(saved: Callable[[str], str], runner: FakeRunner) -> BenchResult:
    settings = DecodeSettings(
        model=saved("llama"), contexts=(64,), batches=(1, 2), warmup=1, steps=2, threads=1
    )
    return bench_decode(settings, progress=silent, runner=runner)


def test_both_files_are_written(result: BenchResult, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    data, picture = output.write_result(result, folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "bench-decode.json",
        "bench-decode.png",
    ]
    document = json.loads(data.read_text(encoding="utf-8"))
    assert document == json.loads(json.dumps(result.to_dict()))
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_the_environment_is_that_of_the_measurement(
    result: BenchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = result.to_dict()
    monkeypatch.setenv("OMP_WAIT_POLICY", "of later")
    assert result.to_dict() == before


def test_a_folder_that_cannot_be_made_is_the_users_error(
    result: BenchResult, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="cannot write"):
        output.write_result(result, tmp_path / "file" / "out")


def test_nothing_half_written_is_left(
    result: BenchResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(result: BenchResult) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(output, "draw", interrupt)
    with pytest.raises(KeyboardInterrupt):
        output.write_result(result, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["bench-decode.json"]


def test_bars_show_medians_and_bytes(result: BenchResult) -> None:
    panels = draw(result).axes
    assert len(panels) == 4
    comparison = result.comparisons[1]
    speeds = [bar.get_width() for bar in panels[2].patches]
    assert speeds == [each.tokens_per_second.median for each in comparison.outcomes]
    sizes = [bar.get_width() * 2**20 for bar in panels[3].patches]
    assert sizes == [each.last.cache_bytes for each in comparison.outcomes]
