"""Measuring processes: what they return, how they fail, in which order, and what they leave."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.bench import processes
from kvfold.bench.processes import measured, run_process, scratch_folder
from kvfold.bench.request import Request
from kvfold.errors import KVFoldError

REQUEST = Request(
    task="prefill",
    model="model",
    dtype="float32",
    device="cpu",
    threads=1,
    subject="snapkv",
    budget="0.25",
    context=64,
    chunk_size=16,
)


def test_a_failed_process_is_one_clear_error() -> None:
    with pytest.raises(KVFoldError) as caught:
        run_process(replace(REQUEST, model="/nowhere/at/all"))
    assert "measuring prefill of snapkv at context 64 failed (exit code 1)" in str(caught.value)
    assert "there is no folder /nowhere/at/all" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("kill -9 $$", "was killed, most likely for memory: use less context"),
        ("echo first >&2; echo last words >&2; echo >&2; exit 3", "(exit code 3): last words"),
        ("exit 4", "(exit code 4): it wrote no error"),
    ],
)
def test_the_last_line_of_a_failed_process_is_told(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat > /dev/null\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(program))
    with pytest.raises(KVFoldError) as caught:
        run_process(REQUEST)
    assert words in str(caught.value)


@pytest.mark.parametrize(("own", "policy"), [(None, ""), ("ACTIVE", "ACTIVE")])
def test_a_process_gets_the_request_and_its_parents_environment(
    own: str | None, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\ncat > {tmp_path}/request\necho $OMP_WAIT_POLICY > {tmp_path}/policy\n"
        f"echo $PYTHONPATH > {tmp_path}/path\necho noise\necho null\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(processes.sys, "executable", str(program))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if own is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    assert run_process(REQUEST) is None
    assert Request.from_json((tmp_path / "request").read_text()) == REQUEST
    assert (tmp_path / "policy").read_text() == f"{policy}\n"
    source = Path(processes.__file__).parents[2]
    assert (tmp_path / "path").read_text().split(os.pathsep)[0].strip() == str(source)


def test_a_runner_that_measures_nothing_is_an_error() -> None:
    with pytest.raises(KVFoldError, match="prefill of snapkv gave no measurement"):
        measured(lambda request: None, REQUEST)


@pytest.mark.parametrize("error", [None, KVFoldError, KeyboardInterrupt])
def test_stored_caches_are_removed(
    error: type[BaseException] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if error is None:
        with scratch_folder(10) as folder:
            (folder / "file").write_text("x")
            assert folder.parent == tmp_path
    else:
        with pytest.raises(error), scratch_folder(10) as folder:
            (folder / "file").write_text("x")
            raise error
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_at_once() -> None:
    with pytest.raises(KVFoldError, match="make room, or set TMPDIR"), scratch_folder(2**62):
        pass
