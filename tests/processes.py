"""Runs kvfold in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, with the checkout's source first on the path."""
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **variables}


def kvfold(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m kvfold` to its end and return what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "kvfold", *arguments],
        capture_output=True,
        text=True,
        env=environment(**variables),
        timeout=300,
        check=False,
    )
