"""`kvfold bench`: options in, tables and JSON out."""

from __future__ import annotations

import json
import shlex
from functools import partial
from pathlib import Path

import pytest

import kvfold.bench
from kvfold.bench import DecodeSettings, PrefillSettings, bench_decode, bench_prefill
from kvfold.cli.app import run
from tests.bench.fakes import FakeRunner, save_tiny

DECODE = ("--context", "64", "--batch", "2", "--warmup", "1", "--steps", "2", "--threads", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    """Puts a runner that starts no process in the place of processes."""
    runner = FakeRunner()
    monkeypatch.setattr(kvfold.bench, "bench_decode", partial(bench_decode, runner=runner))
    monkeypatch.setattr(kvfold.bench, "bench_prefill", partial(bench_prefill, runner=runner))
    return runner


def test_decode_in_processes(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--methods", "snapkv", "--rounds", "1", "--json")
    assert run(["bench", "decode", "--model", folder, *DECODE, *options]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    (comparison,) = document["comparisons"]
    (outcome,) = comparison["outcomes"]
    (raw,) = outcome["measurements"]
    assert (raw["tokens_seen"], raw["tokens_kept"], len(raw["seconds"])) == (64, [15, 15, 15], 2)
    assert outcome["tokens_per_second"]["median"] == pytest.approx(4 / sum(raw["seconds"]))
    assert err.splitlines() == [
        "context 64: prefilling for snapkv",
        "context 64, batch 2: decoding with snapkv, round 1 of 1",
    ]


def test_decode_table(folder: str, fake: FakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "decode", "--model", folder, *DECODE]) == 0
    out = capsys.readouterr().out
    assert "decode, context 64, batch 2" in out
    for subject in ("dynamic", "full", "streaming", "snapkv"):
        assert f"│ {subject} " in out
    assert "snapkv / full: " in out
    assert "snapkv does not pay at context 64, batch 2: slower" in out
    assert "note: the rows of a batch repeat one prefilled row" in out
    assert len(fake.requests) == 3 + 4 * 3


def test_two_tiers_are_told_apart(
    folder: str, fake: FakeRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--context", "2048", "--methods", "full,sekv", "--rounds", "1")
    assert run(["bench", "prefill", "--model", folder, *options]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sekv: ")]
    assert lines[0] == "sekv: 3.0 KiB fast, 2.0 KiB slow, 1.0 KiB moved"
    assert lines[1] == "sekv: of its 1.00 s, surprisal 12.5%, spans 25.0%"
    assert run(["bench", "prefill", "--model", folder, *options, "--json"]) == 0
    full, sekv = json.loads(capsys.readouterr().out)["comparisons"][0]["outcomes"]
    assert (full["slow_bytes"], full["moved_bytes"]) == (0, 0)
    assert (sekv["slow_bytes"], sekv["moved_bytes"]) == (2048, 1024)


def test_prefill_table_and_files(
    folder: str, fake: FakeRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--context", "64,128", "--chunk-size", "32", "--out", str(tmp_path / "out"))
    assert run(["bench", "prefill", "--model", folder, *options]) == 0
    out, err = capsys.readouterr()
    assert "prefill, context 128, batch 1" in out
    assert "snapkv, context 64: attention statistics cost" in out
    assert "streaming, context 128: peak 0 MiB is within" in out
    written = json.loads((tmp_path / "out" / "bench-prefill.json").read_text(encoding="utf-8"))
    assert [each["context"] for each in written["comparisons"]] == [64, 128]
    assert f"wrote {tmp_path}/out/bench-prefill.png" in err.replace("\n", "")


@pytest.mark.parametrize(
    ("kind", "settings"), [("decode", DecodeSettings), ("prefill", PrefillSettings)]
)
def test_the_recorded_command_measures_the_same(
    kind: str,
    settings: type[DecodeSettings | PrefillSettings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = settings(contexts=(64, 96), subjects=("full", "h2o"), budget="10%", threads=3, rounds=1)
    seen: list[object] = []

    def capture(settings: object, **_: object) -> None:
        seen.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(kvfold.bench, f"bench_{kind}", capture)
    assert run(shlex.split(asked.command(kind))[1:]) == 130
    assert seen == [asked]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--context", "12a"), "--context '12a' is not a list of whole numbers"),
        (("--context", "4096"), "longer than the model's 2048 positions"),
        (("--context", ""), "no context is given"),
        (("--batch", "0"), "batch is 0"),
        (("--methods", "best"), "unknown method 'best'"),
        (("--dtype", "int8"), "dtype 'int8' is not one of"),
        (("--out", ""), "output folder is empty"),
        (("--budget", "2.0"), "more than the whole cache"),
        (("--rounds", "two"), "invalid value for '--rounds'"),
        (("--out", "/proc/here"), "cannot write to the folder '/proc/here'"),
    ],
)
def test_bad_options_are_the_users_error(
    folder: str,
    fake: FakeRunner,
    options: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["bench", "decode", "--model", folder, *DECODE, *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert fake.requests == []
