"""Resident memory of this process.

On Linux `getrusage` counts the memory of the process that started this one too, so the peak is read
from `/proc/self/status` where there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident() -> int | None:
    """Bytes resident now; None where the system does not tell."""
    return _status("VmRSS")


def peak_resident() -> int | None:
    """Most bytes that were ever resident; None where the system does not tell."""
    peak = _status("VmHWM")
    return peak if peak is not None else _peak_by_usage()


def available() -> int | None:
    """Bytes that new processes could take; None where the system does not tell."""
    return _kibibytes(Path("/proc/meminfo"), "MemAvailable")


def _status(name: str) -> int | None:
    return _kibibytes(_STATUS, name)


def _kibibytes(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None


def _peak_by_usage() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
