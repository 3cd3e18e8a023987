"""An evaluation of fidelity read back from the numbers that it left."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvfold.errors import ArtifactError, ConfigError
from kvfold.evaluation.fidelity_export import NUMBERS
from kvfold.evaluation.fidelity_found import Fidelity, Subject
from kvfold.evaluation.fidelity_rows import Row
from kvfold.evaluation.fidelity_settings import FidelitySettings, MethodSpec


def read_fidelity(folder: Path) -> Fidelity:
    """Read what `kvfold eval` found.

    Args:
        folder: That it wrote to.

    Raises:
        ConfigError: When there are no results.
        ArtifactError: When they cannot be read.
    """
    path = folder / NUMBERS
    if not path.is_file():
        raise ConfigError(f"{str(folder)!r} has no {NUMBERS}: run kvfold eval --out {folder} first")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return Fidelity(
            command=document["command"],
            subject=Subject(**document["subject"]),
            settings=_settings(document["settings"]),
            rows=tuple(map(Row.from_dict, document["rows"])),
            environment=document["environment"],
            process_peak=document.get("process_peak"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} is damaged or not kvfold's ({type(error).__name__}: {error}): run kvfold eval "
            "again with --resume"
        ) from error


def _settings(document: Mapping[str, Any]) -> FidelitySettings:
    """What `FidelitySettings.to_dict` wrote."""
    known = {each.name: document[each.name] for each in fields(FidelitySettings)}
    methods = tuple(MethodSpec(**each) for each in known.pop("methods"))
    values: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else each for name, each in known.items()
    }
    return FidelitySettings(methods=methods, **values)
