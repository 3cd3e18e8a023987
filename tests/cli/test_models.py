"""`kvfold models`: what is said about the default model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfold.cli.app import run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "500")  # so that no cell is folded
    return tmp_path


def test_list_without_the_model(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "list", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["present"] is False
    assert Path(status["path"]).is_relative_to(home)
    assert run(["models", "list"]) == 0
    assert "kvfold models fetch" in capsys.readouterr().out
    assert list(home.iterdir()) == []


def test_path_without_the_model_says_what_to_do(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["models", "path"]) == 2
    assert "run `kvfold models fetch`" in capsys.readouterr().err
    assert list(home.iterdir()) == []


@pytest.mark.real
def test_the_default_model_is_where_path_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "fetch", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["present"] is True
    assert run(["models", "path"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert str(folder) == status["path"]
    assert (folder / "model.safetensors").stat().st_size == status["weights_bytes"]
    assert run(["models", "path", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": status["path"]}


@pytest.mark.real
def test_info_knows_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "default", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (len(model["layers"]), model["query_heads"], model["kv_heads"]) == (30, 9, 3)
    assert model["max_positions"] == 8192
