"""Where kvfold keeps what it has fetched, and whether the default model is there.

Nothing here needs torch, so that asking is fast; `kvfold.models` fetches and loads.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

DEFAULT_NAME = "SmolLM2-135M-Instruct"
"""What the default model is called, and its folder."""
RECORD = "kvfold.json"
"""File in the default model's folder that tells where it came from."""
WEIGHTS = "model.safetensors"
"""File of the default model's weights."""
REQUIRED_FILES = ("config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json")
"""Without these a folder is not the default model."""


@dataclass(frozen=True, slots=True)
class DefaultStatus:
    """What is known about the default model on this machine."""

    name: str
    """Of the model."""
    path: str
    """Folder it is, or will be, in."""
    present: bool
    """Whether it is there, whole."""
    source: str | None = None
    """Where it came from."""
    source_sha256: str | None = None
    """Checksum of the file that was fetched, if it has a known one."""
    weights_sha256: str | None = None
    """Checksum of the weights when they were written."""
    weights_bytes: int | None = None
    """Size of the weights."""
    date: str | None = None
    """When it was fetched (UTC)."""

    def to_dict(self) -> dict[str, object]:
        """Returns plain values for JSON."""
        return asdict(self)


def kvfold_home() -> Path:
    """Returns `KVFOLD_HOME`, else `XDG_CACHE_HOME/kvfold`, else `~/.cache/kvfold`."""
    explicit = os.environ.get("KVFOLD_HOME")
    if explicit:
        return Path(explicit).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache").absolute() / "kvfold"


def default_path() -> Path:
    """Returns the default model's folder; it need not exist."""
    return kvfold_home() / "models" / DEFAULT_NAME


def default_status() -> DefaultStatus:
    """Looks at what is on this machine; touches no network.

    A folder in which a file is missing or cut short does not count as present.
    """
    folder = default_path()
    absent = DefaultStatus(DEFAULT_NAME, str(folder), present=False)
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        status = DefaultStatus(DEFAULT_NAME, str(folder), present=True, **record)
        size = (folder / WEIGHTS).stat().st_size
    except (OSError, ValueError, TypeError):
        return absent
    complete = all((folder / name).is_file() for name in REQUIRED_FILES)
    return status if complete and size == status.weights_bytes else absent


def public_name(name: str) -> str:
    """A model's name as others may read it: without the folders of this machine."""
    if name == "default":
        return DEFAULT_NAME
    return Path(name).resolve().name if Path(name).is_dir() else name
