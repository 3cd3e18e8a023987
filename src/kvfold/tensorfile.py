"""Tensors on disk: safetensors files that are whole or not there, and sealed by a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvfold.artifacts import write_whole

_HEADER, _SEAL = "kvfold", "sha256"
"""Names of the two texts in a sealed file's own header."""


def digest_of(record: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over a record and every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(record.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        raw = tensor.cpu().contiguous().flatten().view(torch.uint8)
        digest.update(raw.numpy().data)
    return digest.hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    """Write a safetensors file under a temporary name, then rename it.

    Args:
        path: The file; one that is there is replaced.
        tensors: By name.
        metadata: Texts that stand in the file's header.

    Raises:
        ArtifactError: When the file cannot be written; what was there before is still there.
    """

    def save(temporary: Path) -> None:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            save_file(whole, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    write_whole(path, save)


def write_sealed(
    path: Path, header: Mapping[str, object], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write tensors with a header of plain data, and a checksum over both.

    Args:
        path: The file; one that is there is replaced.
        header: As JSON has it.
        tensors: By name.

    Raises:
        ArtifactError: When the file cannot be written; what was there before is still there.
    """
    text = json.dumps(header)
    write_tensors(path, tensors, {_HEADER: text, _SEAL: digest_of(text, tensors)})


def read_sealed(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    """Read what `write_sealed` wrote.

    Returns:
        The header and the tensors.

    Raises:
        FileNotFoundError: When there is no file.
        ValueError: When it is no such file, or was changed since; the message says how it shows.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise
    except (OSError, SafetensorError) as error:
        raise ValueError(str(error)) from error
    if not metadata.keys() >= {_HEADER, _SEAL}:
        raise ValueError("it has no header with a checksum")
    if metadata[_SEAL] != digest_of(metadata[_HEADER], tensors):
        raise ValueError("its checksum does not match")
    header = json.loads(metadata[_HEADER])
    if not isinstance(header, dict):
        raise ValueError("its header is no record")
    return header, tensors
