"""Starting one process a measurement, and what they leave on disk."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kvfold
from kvfold.artifacts import format_bytes
from kvfold.bench.request import Measurement, Request
from kvfold.errors import KVFoldError

Runner = Callable[[Request], Measurement | None]
"""Does one request; the tests put another in the place of `run_process`."""


def run_process(request: Request) -> Measurement | None:
    """Do a request in a process of its own.

    Returns:
        The measurement; None where a cache was stored.

    Raises:
        KVFoldError: When the process failed, with the last line that it wrote.
    """
    result = subprocess.run(
        [sys.executable, "-m", "kvfold.bench.worker"],
        input=request.to_json(),
        capture_output=True,
        text=True,
        env=_environment(),
        check=False,
    )
    if result.returncode != 0:
        raise KVFoldError(_failure(request, result.returncode, result.stderr))
    last = result.stdout.splitlines()[-1]
    return None if last == "null" else Measurement.from_json(last)


def measured(runner: Runner, request: Request) -> Measurement:
    """Do a request that measures.

    Raises:
        KVFoldError: When nothing was measured.
    """
    measurement = runner(request)
    if measurement is None:
        raise KVFoldError(f"{request.task} of {request.subject} gave no measurement")
    return measurement


def _environment() -> dict[str, str]:
    """This process's, so that the child runs the same code."""
    source = str(Path(kvfold.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return {"TOKENIZERS_PARALLELISM": "false", **os.environ, "PYTHONPATH": path}


def _failure(request: Request, code: int, errors: str) -> str:
    what = f"measuring {request.task} of {request.subject} at context {request.context}"
    if code == -signal.SIGKILL:
        return f"{what}: the process was killed, most likely for memory: use less context or batch"
    lines = [line for line in errors.splitlines() if line.strip()] or ["it wrote no error"]
    return f"{what} failed (exit code {code}): {lines[-1].strip()}"


@contextmanager
def scratch_folder(needed: int) -> Iterator[Path]:
    """A temporary folder that is removed at the end, however it comes.

    Args:
        needed: Bytes that will be written.

    Raises:
        KVFoldError: When the disk has not as many left.
    """
    with tempfile.TemporaryDirectory(prefix="kvfold-bench-") as folder:
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise KVFoldError(
                f"stored caches take {format_bytes(needed)} and {folder} has "
                f"{format_bytes(free)} left: make room, or set TMPDIR to another disk"
            )
        yield Path(folder)
