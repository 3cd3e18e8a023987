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
        path = folder / f"{name}-{_digest(source, command)}.so"
        if not path.is_file():
            problem = _compile(command, source, path)
        if path.is_file():
            _require_own(path)
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


def _compile(command: list[str], source: bytes, path: Path) -> str:
    """Write a library under its name, or return what the compiler says against it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        file, made = Path(scratch) / "kernel.c", Path(scratch) / path.name
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
        made.replace(path)
    return ""


def _digest(source: bytes, command: list[str]) -> str:
    """Of all that a library depends on: a folder may be shared by machines that differ."""
    parts = [source, repr(command).encode(), platform.machine().encode(), *_processor()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> list[bytes]:
    wanted = (b"flags", b"Features", b"model", b"CPU")
    try:
        with open("/proc/cpuinfo", "rb") as lines:
            return sorted({line for line in lines if line.startswith(wanted)})
    except OSError:
        return [platform.platform().encode(), platform.processor().encode()]
