"""Tensors on disk: safetensors files that are whole or not there, and checksums over them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvfold.artifacts import write_whole


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
