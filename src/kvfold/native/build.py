"""From a C file of this package to a loaded library."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from kvfold.home import kvfold_home

SWITCH = "KVFOLD_NATIVE"
"""Environment variable; `0` leaves all kernels out."""
_FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
"""NaN and infinity stay what they are; sums that may be in any order say so in the source."""
_ADDITIONS = (
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-fopenmp",),
    ("-march=native", "-fopenmp-simd"),
    (),
)
"""What is tried on top, in order: not every compiler knows every processor, or has threads."""
_LIMIT_S = 60
_log = logging.getLogger(__name__)


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """Compile and load a kernel, once for each process.

    Args:
        name: Of its file, without `.c`.

    Returns:
        The library; None where it is switched off, there is no compiler, or it cannot be compiled
        or kept, which is logged.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        return _load(name)
    # Whatever goes wrong, torch does the work.
    except (OSError, RuntimeError, ValueError) as error:
        _log.warning("kernel %s is left to torch, which is slower: %s", name, error)
        return None


def _load(name: str) -> ctypes.CDLL | None:
    compiler = shlex.split(os.environ.get("CC", "")) or _found("cc") or _found("gcc")
    if not compiler:
        _log.info("kernel %s is left to torch: there is no C compiler", name)
        return None
    source = resources.files("kvfold.native").joinpath(f"{name}.c").read_bytes()
    folder = kvfold_home() / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_own(folder)
    problem = ""
    for more in _ADDITIONS:
        command = [*compiler, *_FLAGS, *more]
        stem = f"{name}-{_digest(source, command)}"
        path = _kept(folder, stem)
        if path is None:
            problem = _compile(command, source, folder, stem)
            path = _kept(folder, stem)
        if path is not None:
            return ctypes.CDLL(str(path))
    raise RuntimeError(problem)


def _found(name: str) -> list[str]:
    path = shutil.which(name)
    return [] if path is None else [path]


def _require_own(path: Path) -> None:
    """Refuse what another user could have written: it is going to be run."""
    if not hasattr(os, "getuid"):
        return
    facts = path.lstat()
    is_own, is_link = facts.st_uid == os.getuid(), stat.S_ISLNK(facts.st_mode)
    if not is_own or is_link or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"{path} could have been written by others: remove it, or set KVFOLD_HOME to a folder "
            "of your own"
        )


def _kept(folder: Path, stem: str) -> Path | None:
    """The library that was kept under a name, whole: it ends in a checksum of what it holds."""
    for path in folder.glob(f"{stem}-*.so"):
        _require_own(path)
        if path.stem == f"{stem}-{_checksum(path.read_bytes())}":
            return path
        path.unlink()
    return None


def _compile(command: list[str], source: bytes, folder: Path, stem: str) -> str:
    """Keep a library under a name, or return what the compiler says against it."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        file, made = Path(scratch) / "kernel.c", Path(scratch) / "kernel.so"
        file.write_bytes(source)
        try:
            subprocess.run(
                [*command, str(file), "-o", str(made), "-lm"],
                check=True, capture_output=True, timeout=_LIMIT_S, text=True,
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            return error.stderr.strip()[-300:] or str(error)
        except subprocess.TimeoutExpired as error:
            return str(error)
        made.chmod(0o700)
        made.replace(folder / f"{stem}-{_checksum(made.read_bytes())}.so")
    return ""


def _digest(source: bytes, command: list[str]) -> str:
    """Of all that a library depends on: a folder may be shared by machines that differ."""
    parts = [source, repr(command).encode(), platform.machine().encode(), *_processor()]
    return _checksum(b"\0".join(parts))


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _processor() -> list[bytes]:
    wanted = (b"flags", b"Features", b"model", b"CPU")
    try:
        with open("/proc/cpuinfo", "rb") as lines:
            return sorted({line for line in lines if line.startswith(wanted)})
    except OSError:
        return [platform.platform().encode(), platform.processor().encode()]
