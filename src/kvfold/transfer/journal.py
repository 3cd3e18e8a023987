"""A calibration on disk: one file a stage, from which it goes on as if it had never stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvfold.artifacts import write_files
from kvfold.errors import ArtifactError, ConfigError
from kvfold.tensorfile import read_sealed, write_sealed

FORMAT = 1
"""Version of the files."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """What a stage has come to."""

    facts: dict[str, object]
    """Plain data."""
    tensors: dict[str, torch.Tensor]
    """By name."""


class Journal:
    """Reads and writes the stages of one run; without a folder it forgets everything."""

    def __init__(self, folder: Path | None, identity: Mapping[str, object]) -> None:
        """Open or begin a run's folder.

        Args:
            folder: Where to; None keeps nothing.
            identity: What a run that goes on must share: models, texts, settings.
        """
        self._folder = folder
        # As it comes back from a file.
        self._identity = json.loads(json.dumps(dict(identity)))

    def read(self, stage: str) -> Entry | None:
        """What was written of a stage; None when nothing was.

        Raises:
            ArtifactError: When the file is damaged.
            ConfigError: When it is of a run with other models, texts or settings.
        """
        path = self._path(stage)
        if path is None or not path.exists():
            return None
        try:
            record, tensors = read_sealed(path)
            facts, identity, version = record["facts"], record["identity"], record["format"]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{path} is damaged or not a calibration's state ({error}): remove it, or "
                "calibrate in another folder"
            ) from error
        if version != FORMAT or identity != self._identity:
            differing = sorted(
                name for name in self._identity if identity.get(name) != self._identity[name]
            )
            raise ConfigError(
                f"{path} is of a calibration with other {', '.join(differing) or 'versions'}: "
                "go on with the same, or choose another folder"
            )
        return Entry(facts, tensors)

    def write(
        self, stage: str, facts: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Write what a stage has come to, whole or not at all.

        Raises:
            ArtifactError: When it cannot be written.
        """
        path = self._path(stage)
        if path is None:
            return
        write_files(path.parent, {})
        record = {"format": FORMAT, "identity": self._identity, "facts": dict(facts)}
        write_sealed(path, record, tensors)

    def _path(self, stage: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{stage}.safetensors"
