"""A training run on disk: one safetensors file from which it goes on bit for bit."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from kvfold.errors import ArtifactError, ConfigError
from kvfold.tensorfile import digest_of, read_sealed, write_tensors
from kvfold.version import __version__

CHECKPOINT = "checkpoint.safetensors"
"""Name of the file in the folder of a run."""
FORMAT = 1
"""Version of the file format."""

Metrics = dict[str, float | None]
"""Values by name; None for one that was not a finite number."""
Tensors = dict[str, torch.Tensor]
"""Tensors by name."""


class Point(TypedDict):
    """One step of a curve."""

    step: int
    """Steps done; 0 before the first."""
    train: Metrics
    """Of the step itself; empty at 0."""
    validation: Metrics
    """After the step; empty where nothing was validated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All that a run needs to go on as if it had never stopped."""

    step: int
    """Steps done."""
    seconds: float
    """Time they took, over all sessions."""
    curve: list[Point]
    """What was measured."""
    best_step: int
    """Steps after which the validation was best."""
    best_metrics: Metrics
    """That validation."""
    identity: dict[str, object]
    """What the learner says a resumed run must share."""
    settings: dict[str, object]
    """What the run was asked to do."""
    versions: dict[str, str]
    """Of what it ran on."""
    module: Tensors
    """The module's state after the last step."""
    optimiser: Tensors
    """State of the optimiser, by the parameter's name and its own."""
    best: Tensors
    """The module's state after the best step."""
    extra: Tensors
    """The learner's own state."""


_GROUPS = ("module", "optimiser", "best", "extra")
_FACTS = (
    "step", "seconds", "curve", "best_step", "best_metrics", "identity", "settings", "versions",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Versions on which a run depends for its last bit."""
    return {"kvfold": __version__, "torch": torch.__version__}


def write_checkpoint(checkpoint: Checkpoint, folder: Path) -> Path:
    """Write a checkpoint under a temporary name, then rename it.

    Args:
        checkpoint: What to write.
        folder: That of the run, which exists.

    Returns:
        The file.

    Raises:
        ArtifactError: When the file cannot be written; what was there before is still there.
    """
    record = {"format": FORMAT} | {name: getattr(checkpoint, name) for name in _FACTS}
    text = json.dumps(record, allow_nan=False)
    tensors = {
        f"{group}.{name}": tensor
        for group in _GROUPS
        for name, tensor in getattr(checkpoint, group).items()
    }
    metadata = {"kvfold": text, "sha256": digest_of(text, tensors)}
    write_tensors(folder / CHECKPOINT, tensors, metadata)
    return folder / CHECKPOINT


def find_checkpoint(folder: Path, *, resume: bool) -> Checkpoint | None:
    """What a run in a folder begins with.

    Args:
        folder: That of the run.
        resume: Go on with what is there; an absent or empty folder starts a new run.

    Returns:
        The checkpoint to go on with; None for a new run.

    Raises:
        ConfigError: When a new run would replace a checkpoint, or there is none among the files
            of a folder to resume in.
        ArtifactError: When the checkpoint cannot be read.
    """
    path = folder / CHECKPOINT
    if path.exists():
        if resume:
            return read_checkpoint(path)
        raise ConfigError(f"{folder} holds the checkpoint of a run: resume it, or choose another")
    if resume and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} holds files but no {CHECKPOINT} to resume: give the folder of a run, or a "
            "new one"
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint that `write_checkpoint` wrote.

    Raises:
        ArtifactError: When it is damaged, of another format, or no checkpoint.
    """
    try:
        record, tensors = read_sealed(path)
        if record["format"] == FORMAT:
            return _assemble(record, tensors)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{path} is damaged or not a checkpoint of kvfold ({error}): start again in another "
            "folder"
        ) from error
    raise ArtifactError(
        f"{path} has checkpoint format {record['format']}, this version reads {FORMAT}: start "
        "again in another folder, or go on with the version that wrote it"
    )


def require_same_run(
    checkpoint: Checkpoint,
    *,
    identity: Mapping[str, object],
    settings: Mapping[str, object],
    module: torch.nn.Module,
) -> None:
    """Refuse a checkpoint that is not of the run that is to go on.

    Args:
        checkpoint: What was found.
        identity: What the learner says of itself now.
        settings: What the run is asked to do now.
        module: What is trained.

    Raises:
        ArtifactError: When the identity or the module's weights differ.
        ConfigError: When the settings differ.
    """
    advice = "give what it was started with, or choose another folder"
    if found := _differences(checkpoint.identity, identity):
        raise ArtifactError(f"the checkpoint is of another run ({found}): {advice}")
    if found := _differences(checkpoint.settings, settings):
        raise ConfigError(f"the checkpoint was made with other settings ({found}): {advice}")
    wanted = _shapes(module.state_dict())
    for tensors in (checkpoint.module, checkpoint.best):
        if found := _differences(_shapes(tensors), wanted):
            raise ArtifactError(f"the checkpoint has other weights ({found}): {advice}")


def copied(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The same, apart from what goes on changing."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def optimiser_state(optimiser: torch.optim.Optimizer, module: torch.nn.Module) -> Tensors:
    """A copy of an optimiser's state under names such as `layer.weight.exp_avg`."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, parameter in module.named_parameters()
        for key, value in optimiser.state.get(parameter, {}).items()
    }


def load_optimiser_state(
    optimiser: torch.optim.Optimizer, module: torch.nn.Module, tensors: Tensors
) -> None:
    """Put back what `optimiser_state` gave."""
    parameters = dict(module.named_parameters())
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(".")
        parameter = parameters[name]
        device = tensor.device if key == "step" else parameter.device  # AdamW counts on the CPU
        optimiser.state[parameter][key] = tensor.to(device, copy=True)


def _assemble(record: dict, tensors: Tensors) -> Checkpoint:
    groups: dict[str, Tensors] = {group: {} for group in _GROUPS}
    for full_name, tensor in tensors.items():
        group, _, name = full_name.partition(".")
        groups[group][name] = tensor
    fields: dict = {name: record[name] for name in _FACTS} | groups
    return Checkpoint(**fields)


def _differences(found: Mapping[str, object], given: Mapping[str, object]) -> str:
    """Names and both values of what differs; empty when nothing does."""
    found, given = (json.loads(json.dumps(dict(each))) for each in (found, given))
    names = [name for name in sorted({*found, *given}) if found.get(name) != given.get(name)]
    return ", ".join(
        f"{name} {reprlib.repr(found.get(name))} there, {reprlib.repr(given.get(name))} here"
        for name in names
    )


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}
