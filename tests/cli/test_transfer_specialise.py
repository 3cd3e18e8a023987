"""`kvfold transfer specialise`: files, progress, use as a model, and what is refused at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from kvfold.cli.app import run
from kvfold.models import load_model
from kvfold.models.adapter import FILE
from kvfold.training.checkpoint import CHECKPOINT
from kvfold.transfer.specialise import CURVE
from tests.tiny_folder import save_tiny

QUICK = [
    *("--steps", "2", "--every", "1", "--lengths", "400,600", "--step-tokens", "800"),
    *("--rank", "2", "--validation", "2"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("private") / "tiny-model")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def specialise(model: str, *arguments: str) -> int:
    return run(["transfer", "specialise", "--model", model, *QUICK, *arguments])


def test_files_progress_and_use(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvfold.cli.console.SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr("kvfold.cli.console.now_and_then", lambda say: say)
    assert specialise(model, "--out", "special") == 0
    shown, said = capsys.readouterr()
    assert "best after" in shown
    assert sorted(path.name for path in Path("special").iterdir()) == [FILE, CHECKPOINT, CURVE]
    assert imread(Path("special") / CURVE).ndim == 3
    assert "step 2 of 2: loss " in said
    assert f"use it: kvfold transfer calibrate {model} special" in said
    loaded, _ = load_model("special")
    assert loaded.num_parameters() == load_model(model)[0].num_parameters()


def test_json_has_the_record(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert specialise(model, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["adapter"] == f"kvfold-specialist/{FILE}"
    assert document["steps"] == 2
    assert [corpus["length"] for corpus in document["identity"]["corpora"]] == [400, 600]
    assert document["settings"]["precision"] == "float32"


def test_a_folder_with_a_run_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert specialise(model) == 0
    assert specialise(model) == 2
    assert "holds the checkpoint of a run" in capsys.readouterr().err
    assert specialise(model, "--resume") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "long"], "--lengths 'long': give numbers of tokens"),
        (["--lengths", "400,400"], "has a length twice"),
        (["--rank", "0"], "rank is 0"),
        (["--precision", "half"], "precision is 'half'"),
    ],
)
def test_bad_input_is_refused(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert specialise(model, *arguments) == 2
    assert message in capsys.readouterr().err
