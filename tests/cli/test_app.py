"""The command line as a whole."""

from __future__ import annotations

import os
from importlib import import_module

import pytest

from kvfold.cli import ENVIRONMENT, SHARED, main
from kvfold.cli.app import COMMANDS, run
from kvfold.version import __version__
from tests.processes import kvfold


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    out, err = capsys.readouterr()
    assert [name for name in COMMANDS if name not in out] == []
    assert "--debug" in out
    assert err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module(f"kvfold.cli.{name}")
    assert hasattr(module, "app") or callable(getattr(module, name))
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"kvfold {name}" in out
    assert "--json" in out or hasattr(module, "app")


@pytest.mark.parametrize(
    "command", [["compare"], ["generate"], ["bench", "decode"], ["bench", "prefill"], ["info"]]
)
def test_help_is_not_cut_off(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvfold {__version__}\n"


def test_main_sets_the_environment_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT | SHARED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    assert main(["--version"]) == 0
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "0"
    for name in ENVIRONMENT | SHARED:
        monkeypatch.setenv(name, os.environ[name])  # so that it is taken back after the test


def test_a_measurement_runs_as_a_users_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT | SHARED:
        monkeypatch.delenv(name, raising=False)
    assert main(["bench", "--help"]) == 0
    assert "OMP_WAIT_POLICY" not in os.environ
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, os.environ[name])  # so that it is taken back after the test


def test_a_process_exits_with_the_code() -> None:
    result = kvfold("info", "--bad")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "kvfold: no such option: --bad; see `kvfold info --help`\n"
