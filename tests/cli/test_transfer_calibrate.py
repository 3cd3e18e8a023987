"""`kvfold transfer calibrate`: what it writes, how it goes on, and what it refuses at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from matplotlib.image import imread

from kvfold.cli.transfer_calibrate import _excerpts
from kvfold.training import Corpus, Excerpt
from kvfold.transfer import Codec
from kvfold.transfer.journal import Journal
from tests.cli.transfer_pair import calibrated, save_pair, write_text
from tests.tiny_folder import byte_tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("private"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_text(Path("text.txt"))
    return tmp_path


def test_codec_picture_record_and_progress(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvfold.cli.console.now_and_then", lambda say: say)
    assert calibrated(pair, "new/codec", "--payload", "0.6") == 0
    shown, said = capsys.readouterr()
    assert "base to special" in shown
    assert "of raw bfloat16" in shown
    stages = ("reading for moments: 6 of 6", "restoring layers: 3 of 3", "measuring payloads")
    for stage in (*stages, "refining decoders: 2 of 2"):
        assert stage in said
    assert "serve it: kvfold transfer serve new/codec" in said
    codec = Codec.load("new/codec")
    assert codec.share(96) <= 0.6
    assert imread("new/codec/calibration.png").ndim == 3
    record = codec.record
    assert record["models"] == {"producer": "base", "consumer": "special"}
    assert str(record["command"]).startswith("kvfold")
    refined = record["refined"]
    assert isinstance(refined, dict) and refined["texts"] == 4
    curve, growth = record["curve"], record["growth"]
    assert isinstance(curve, list) and isinstance(growth, dict)
    assert [share for share, _ in curve] == sorted(share for share, _ in curve)
    assert curve[-1][1] < curve[0][1]
    assert all(len(errors) == 3 for errors in growth.values())
    assert set(growth) == {"as made", *(["without patches"] if codec.patched else [])}


def test_json_is_one_document_without_private_folders(
    pair: tuple[str, str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrated(pair, "codec", "--max-kl", "0.5", "--patches", "0", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["codec"] == "codec/codec.safetensors"
    assert document["target"] == {"payload": None, "max_kl": 0.5}
    assert document["patched"] == []
    assert document["texts"] == 6
    (corpus,) = document["corpora"]
    assert corpus["length"] == 96 and document["lengths"] == [96]
    assert [source["name"] for source in corpus["sources"]] == ["text.txt"]


def test_texts_of_several_lengths(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--payload", "0.6", "--lengths", "80,96,130", "--tokens", "60", "--json")
    assert calibrated(pair, "codec", *options) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["lengths"] == [80, 96, 130]
    assert [corpus["length"] for corpus in document["corpora"]] == [80, 96, 130]
    assert document["payload"] == Codec.load("codec").share(60) <= 0.6
    assert document["settings"]["probes"] == 6
    assert document["refined"]["curve"][-1]["step"] == 3


def test_no_two_texts_have_one_number() -> None:
    drawn: list[tuple[int, int]] = []

    class Numbered:
        def __init__(self, length: int) -> None:
            self.length = length

        def excerpt(self, index: int, split: str) -> Excerpt:
            drawn.append((self.length, index))
            return Excerpt(torch.zeros(self.length, dtype=torch.long), split, None)

    corpora = cast("list[Corpus]", [Numbered(3), Numbered(5)])
    assert [len(text) for text in _excerpts(corpora, 5, "train")] == [3, 5, 3, 5, 3]
    assert drawn == [(3, 0), (5, 1), (3, 2), (5, 3), (3, 4)]


def test_an_interrupted_run_says_how_to_go_on_and_does(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Journal.write

    def interrupt(self: Journal, stage: str, *arguments: object) -> None:
        write(self, stage, *arguments)  # pyright: ignore[reportArgumentType]
        if stage == "weights":
            raise KeyboardInterrupt

    target = ("--payload", "0.6")
    with monkeypatch.context() as during:
        during.setattr(Journal, "write", interrupt)
        assert calibrated(pair, "run", *target) == 130
    assert "run holds the run so far: the same command with --resume" in capsys.readouterr().err
    assert calibrated(pair, "run", *target) == 2
    assert "--resume goes on with it, or choose another --out" in capsys.readouterr().err
    assert calibrated(pair, "run", *target, "--resume") == 0
    assert calibrated(pair, "whole", *target) == 0
    assert Codec.load("run").digest == Codec.load("whole").digest


def test_two_tokenizers_are_refused(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, _ = save_pair(tmp_path / "other")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    assert calibrated((pair[0], other), "codec") == 2
    assert "different tokenizers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--payload", "0.5", "--max-kl", "0.1"], "payload and max_kl were both given"),
        (["--payload", "0"], "payload 0 is not a share"),
        (["--max-kl", "-1"], "max_kl -1 is not above 0"),
        (["--out", "text.txt"], "cannot write to the folder"),
        (["--out", "fresh", "--resume"], "fresh holds no state of a calibration"),
        (["--out", "held"], "held holds a calibration"),
        (["--count", "0"], "--count 0 is below 1"),
        (["--refine", "-1"], "--refine -1 is below 0: give 0"),
        (["--continuation", "0"], "--continuation 0 is below 1"),
        (["--tokens", "71"], "--tokens 71 is too short to measure by: give at least 72"),
        (["--lengths", "71,96"], "--lengths 71 is too short to measure by: give at least 72"),
        (["--lengths", "96,128", "--continuation", "90"], "--lengths 96 is too short"),
        (["--lengths", "96,96"], "--lengths '96,96' has a length twice"),
        (["--lengths", "96,x"], "--lengths '96,x': give numbers of tokens"),
        (["--lengths", "0"], "--lengths 0 is below 1"),
        (["--lengths", "96,128", "--count", "1"], "--count 1 is too few for 2 lengths"),
        (["--lengths", "96,128", "--refine", "1"], "--refine 1 is too few for 2 lengths"),
        (["--patches", "-1"], "patches -1 is not 0 or more"),
        (["--widths", "3"], "widths (3,) is not some of"),
        (["--widths", "8;4"], "--widths '8;4': give numbers of bits"),
        (["--dtype", "int8"], "dtype 'int8' is not one of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_code_2_before_a_model_is_loaded(
    arguments: list[str],
    message: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvfold.cli.transfer_calibrate.load", load)
    Path("held/state").mkdir(parents=True)
    before = sorted(here.rglob("*"))
    assert calibrated(("default", "default"), "codec", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert sorted(here.rglob("*")) == before
