"""`kvfold transfer answers`: table, files, going on, and what is refused at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from kvfold.cli.app import run
from tests.cli.transfer_pair import calibrated, save_pair, write_text

WAYS = ["oracle", "base", "raw", "rerotated", "int8", "int4", "recompute", "codes codec"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("private")
    pair = save_pair(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_text(Path("text.txt"))
        assert calibrated(pair, "codec", "--payload", "0.6") == 0
    return pair


@pytest.fixture(autouse=True)
def here(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(pair[0]).parent)


def answers(pair: tuple[str, str], out: Path, *arguments: str) -> int:
    given = ["--items", "2", "--lengths", "500", "--out", str(out)]
    return run(["transfer", "answers", *pair, "codec", *given, *arguments])


def test_json_files_and_going_on(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answers(pair, tmp_path, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "transfer-answers.json").read_text()) == document
    assert imread(tmp_path / "transfer-answers.png").ndim == 3
    assert [way["way"] for way in document["ways"]] == WAYS
    assert document["settings"] == {"items": 2, "lengths": [500], "seed": 0}
    assert (document["producer"], document["device"]) == ("base", "cpu")
    assert document["ways"][0]["f1"]["count"] == 2
    assert list(document["by_length"]) == ["500"]
    assert answers(pair, tmp_path) == 2
    assert "holds results" in capsys.readouterr().err
    assert answers(pair, tmp_path, "--resume") == 0
    shown = capsys.readouterr().out
    assert "base to special, 2 items" in shown
    assert "rerotated" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--items", "0"], "--items 0 is below 1"),
        (["--lengths", "long"], "--lengths 'long': give numbers of tokens"),
        (["--lengths", "0"], "--lengths 0 is below 1"),
    ],
)
def test_bad_input_is_refused(
    pair: tuple[str, str],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answers(pair, tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err
