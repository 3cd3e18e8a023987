"""The command line as a whole."""

from __future__ import annotations

import inspect
import os
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

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
    "command",
    [
        *(["compare"], ["generate"], ["train", "distill"], ["eval"], ["info"]),
        *(["bench", "decode"], ["bench", "prefill"], ["models", "fetch"]),
    ],
    ids=" ".join,
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
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    assert os.environ["MKL_CBWR"] == "AUTO"
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "0"
    for name in ENVIRONMENT | SHARED:
        monkeypatch.setenv(name, os.environ[name])  # so that it is taken back after the test


@pytest.mark.parametrize(
    ("arguments", "is_shared"),
    [
        (["bench", "--help"], False),
        (["--debug", "bench", "--help"], False),
        (["bench", "decode", "--debug", "--help"], False),
        (["diffuse", "bench", "--help"], False),
        (["transfer", "bench", "--help"], False),
        (["diffuse", "generate", "--help"], True),
        (["--help"], True),
        (["--debug", "info", "--help"], True),
        (["generate", "bench", "--help"], True),
    ],
)
def test_a_measurement_runs_as_a_users_program_does(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, *, is_shared: bool
) -> None:
    for name in ENVIRONMENT | SHARED:
        monkeypatch.delenv(name, raising=False)
    assert main(arguments) == 0
    assert ("OMP_WAIT_POLICY" in os.environ) is is_shared
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # so that it is taken back after the test
    for name in ENVIRONMENT:
        monkeypatch.setenv(name, os.environ[name])  # so that it is taken back after the test


def outputs() -> dict[str, str]:
    """The folder that each command writes to unless told otherwise."""
    found = {}
    for name in COMMANDS:
        module = import_module(f"kvfold.cli.{name}")
        group = module.app.registered_commands if hasattr(module, "app") else []
        for command in [each.callback for each in group] or [getattr(module, name)]:
            default = inspect.signature(command).parameters.get("out")
            if default is not None and default.default:
                found[f"{name} {command.__name__}"] = str(default.default)
    return found


def test_git_ignores_what_the_commands_write_by_default() -> None:
    lines = (Path(__file__).parents[2] / ".gitignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.strip("/") for line in lines if line.startswith("/")]
    assert {"compare compare", "train distill", "eval eval"} <= set(outputs())
    for command, folder in outputs().items():
        assert any(fnmatch(folder, pattern) for pattern in patterns), command


def test_a_process_exits_with_the_code() -> None:
    result = kvfold("info", "--bad")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "kvfold: no such option: --bad; see `kvfold info --help`\n"
