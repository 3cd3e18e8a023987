"""Exceptions become one line on standard error and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from kvfold.cli.app import run, take_debug
from kvfold.cli.failures import explain, guarded
from kvfold.errors import (
    ArtifactError,
    BudgetError,
    ConfigError,
    KVFoldError,
    TransferError,
    UnsupportedModelError,
)
from tests.processes import environment


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such thing; name another"), 2),
        (BudgetError("budget 2 is too much; give less"), 2),
        (UnsupportedModelError("no RoPE; use another model"), 2),
        (ArtifactError("damaged; fetch it again"), 2),
        (TransferError("cut short; run it again"), 1),
        (KVFoldError("no network; connect to one"), 1),
    ],
)
def test_own_errors_are_said_as_they_are(
    error: KVFoldError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(raising(error), [], debug=False) == code
    assert capsys.readouterr() == ("", f"kvfold: {error}\n")


def test_other_errors_are_failures_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(RuntimeError("first\n  second.")), [], debug=False) == 1
    expected = "kvfold: failed: RuntimeError: first second; run with --debug for the traceback\n"
    assert capsys.readouterr() == ("", expected)


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(ConfigError("wrong")), [], debug=True) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "kvfold: wrong"


def test_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(KeyboardInterrupt()), [], debug=False) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvfold: interrupted")
    assert err.count("\n") == 1


def test_exit_keeps_its_code() -> None:
    assert guarded(raising(typer.Exit(3)), [], debug=False) == 3
    assert guarded(lambda: None, [], debug=False) == 0


def opening(path: Path) -> OSError:
    with pytest.raises(OSError) as caught:
        path.read_text()
    return caught.value


@pytest.mark.parametrize("form", ["{}", "--document={}"])
def test_missing_file_is_the_users_error_only_if_the_user_named_it(
    form: str, tmp_path: Path
) -> None:
    error = opening(tmp_path / "text")
    code, text = explain(error, [form.format(tmp_path / "text")])
    assert code == 2
    assert str(tmp_path / "text") in text
    assert "No such file" in text
    assert explain(error, ["--out", str(tmp_path)])[0] == 2
    assert explain(error, ["elsewhere"])[0] == 1


@pytest.mark.parametrize(
    ("arguments", "rest", "debug"),
    [
        (["info"], ["info"], False),
        (["--debug", "info"], ["info"], True),
        (["info", "--debug", "default"], ["info", "default"], True),
        (["info", "--", "--debug"], ["info", "--", "--debug"], False),
        (["--debug", "info", "--", "x"], ["info", "--", "x"], True),
    ],
)
def test_debug_is_taken_from_anywhere(
    arguments: list[str], rest: list[str], *, debug: bool
) -> None:
    assert take_debug(arguments) == (rest, debug)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "--bad"], "--bad; see `kvfold info --help`"),
        (["info", "a", "b"], "(b); see `kvfold info --help`"),
        (["models"], "missing command; see `kvfold models --help`"),
        (["models", "fecth"], "Did you mean 'fetch'? See `kvfold models --help`"),
        (["nonsense"], "'nonsense'; see `kvfold --help`"),
        (["--bad"], "--bad; see `kvfold --help`"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvfold: ")
    assert err.endswith(f"{message}\n")
    assert err.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m kvfold info --json | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment(), check=False
    )
    assert (result.returncode, result.stderr) == (141, "")
