"""`kvfold info`: the environment and a model's anatomy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfold.cli.app import run
from kvfold.version import __version__
from tests.tiny import tiny_config


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = tiny_config("mistral_window", dtype="float32")
    config.architectures = ["MistralForCausalLM"]
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_json_describes_environment_and_model(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", folder, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert document["environment"]["kvfold"] == __version__
    model = document["model"]
    assert (model["query_heads"], model["kv_heads"], model["head_dim"]) == (4, 2, 16)
    assert [layer["window"] for layer in model["layers"]] == [24, 24, 24]
    assert model["windowed_bytes_per_token"] == 3 * 2 * 2 * 16 * 4  # layers, k and v, heads, dim


def test_table_describes_the_model(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", folder]) == 0
    out = capsys.readouterr().out
    for expected in (__version__, "MistralForCausalLM", "3 sliding (24 tokens)", "257"):
        assert expected in out


def test_without_a_model_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] is None


def test_unknown_folder_is_the_users_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(tmp_path / "nowhere")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "nowhere" in err
    assert err.count("\n") == 1
