"""From a C file of this package to a loaded library."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from kvfold.home import kvfold_home

SWITCH = "KVFOLD_NATIVE"
"""Environment variable; `0` leaves all kernels out."""
_FLAGS = (
    "-O3", "-march=native", "-std=c11", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math", "-ffp-contract=fast",
)  # fmt: skip
"""Sums in any order, but NaN and infinity stay what they are."""
_ADDITIONS = (("-fopenmp",), ())
"""What is tried on top, in order: not every compiler has threads."""
_LIMIT_S = 60
_log = logging.getLogger(__name__)


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """Compile and load a kernel, once for each process.

    Args:
        name: Of its file, without `.c`.

    Returns:
        The library; None where it is switched off, or cannot be compiled or kept, which is logged.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if os.environ.get(SWITCH) == "0" or compiler is None:
        return None
    source = resources.files(__package__).joinpath(f"{name}.c").read_bytes()
    problems: list[str] = []
    for more in _ADDITIONS:
        command = [compiler, *_FLAGS, *more]
        try:
            return ctypes.CDLL(str(_built(name, source, command)))
        except (OSError, subprocess.SubprocessError) as error:
            problems.append(str(error))
    _log.info("kernel %s is left to torch: %s", name, "; ".join(problems))
    return None


def _built(name: str, source: bytes, command: list[str]) -> Path:
    """The file of a library, compiled unless it stands there from the same source and machine."""
    digest = hashlib.sha256(b"\0".join([source, repr(command).encode(), _processor()])).hexdigest()
    path = kvfold_home() / "native" / f"{name}-{digest[:16]}.so"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            file, made = Path(scratch) / f"{name}.c", Path(scratch) / path.name
            file.write_bytes(source)
            whole = [*command, str(file), "-o", str(made), "-lm"]
            subprocess.run(whole, check=True, capture_output=True, timeout=_LIMIT_S)
            made.replace(path)
    return path


def _processor() -> bytes:
    """What a compiled file runs on: a folder may be shared by machines that differ."""
    try:
        with open("/proc/cpuinfo", "rb") as lines:
            known = {line for line in lines if line.startswith((b"flags", b"Features", b"model"))}
    except OSError:
        known = set()
    return b"".join([platform.platform().encode(), *sorted(known)])
