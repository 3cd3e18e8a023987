"""`kvfold transfer bench`: stages, payloads and ratios of a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from kvfold.cli.app import run
from kvfold.transfer import BASELINES, Codec
from tests.cli.transfer_pair import calibrated, save_pair, write_text


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


def bench(pair: tuple[str, str], *arguments: str) -> int:
    given = ["--texts", "text.txt", "--tokens", "96", "--continuation", "16", "--rounds", "2"]
    return run(["transfer", "bench", *pair, "codec", *given, "--bandwidths", "50,1000", *arguments])


def test_json_chart_and_every_subject(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(pair, "--out", "result", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert json.loads(Path("result/transfer-bench.json").read_text()) == document
    assert imread("result/transfer-bench.png").ndim == 3
    subjects = document["subjects"]
    assert list(subjects) == ["own prefill", *subjects_of("codes codec")]
    raw = 95 * 3 * 2 * 2 * 16 * 2
    assert subjects["raw"]["payload"] == raw
    assert subjects["codes codec"]["payload"] == Codec.load("codec").payload([95])
    assert subjects["own prefill"]["divergence"] == 0
    assert subjects["codes codec"]["divergence"] < subjects["raw"]["divergence"]
    for name in subjects_of("codes codec"):
        for rate, samples in subjects[name]["sending"].items():
            assert len(samples) == 2
            assert min(samples) >= 0.99 * 8 * subjects[name]["payload"] / float(rate)
    assert set(subjects["codes codec"]["seconds"]) == {
        *("prefill", "encode", "decode", "patch", "first token"),
    }


def subjects_of(codec: str) -> list[str]:
    return [codec, *(name for name in BASELINES if name != "oracle")]


def test_tables(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(pair) == 0
    out = capsys.readouterr().out
    assert "the producer has read the prefix" in out
    assert "it reads it first" in out
    assert "base to special" in out
    assert "50 Mbit/s" in out and "1000 Mbit/s" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bandwidths", "fast"], "--bandwidths 'fast': give Mbit/s above 0"),
        (["--bandwidths", "0"], "--bandwidths '0': give Mbit/s above 0"),
        (["--rounds", "0"], "--rounds 0 is below 1"),
        (["--tokens", "0"], "--tokens 0 is below 1"),
        (["--out", "text.txt"], "cannot write to the folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    pair: tuple[str, str],
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvfold.cli.transfer_bench.load", load)
    assert bench(pair, *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
