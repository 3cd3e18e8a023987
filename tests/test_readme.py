"""What the README shows runs as it stands there."""

import shlex
from pathlib import Path

import pytest

import kvfold
from kvfold.cli import main
from tests.documents import ROOT, blocks, for_this_transformers

README = (ROOT / "README.md").read_text(encoding="utf-8")
QUICK = {
    "compare": ["--max-new-tokens", "4", "--methods", "full,streaming"],
    "generate": ["--max-new-tokens", "4"],
    "train": shlex.split(
        "--steps 1 --ranker-texts 1 --length 128 --horizon 8 --rollouts 2 --validation 1"
    ),
    "eval": shlex.split("--samples 1 --length 160 --tokens 4 --max-new-tokens 4"),
    "bench": shlex.split(
        "--context 64 --batch 1 --rounds 1 --steps 1 --warmup 1 --methods full,tova"
    ),
}


def commands() -> list[list[str]]:
    lines = [line for block in blocks(README, "bash") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("kvfold ")]


def test_there_is_something_to_run():
    assert len(blocks(README, "python")) == 3
    assert {command[0] for command in commands()} == set(QUICK)


@pytest.mark.real
def test_the_python_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(README, "python"):
        exec(for_this_transformers(block), names)
    assert "France" in capsys.readouterr().out
    assert isinstance(names["cache"], kvfold.KVCache)


@pytest.mark.real
@pytest.mark.parametrize("command", commands(), ids=lambda command: command[0])
def test_the_commands_run(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("Mary Jones signed the contract in May. " * 20)
    assert main([*command, *QUICK[command[0]]]) == 0
