"""Weights in safetensors files of any family's names, read into our decoder."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvfold.diffusion.decoder import Decoder
from kvfold.diffusion.families import Family
from kvfold.diffusion.shape import DecoderShape
from kvfold.errors import ArtifactError, ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""The list of a sharded checkpoint's files, and the one file of another."""

_LAYER = re.compile(r"layers\.(\d+)\.")


def read_decoder(
    folder: Path,
    family: Family,
    shape: DecoderShape,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Decoder:
    """A decoder with the weights of a folder.

    Args:
        folder: Holds one safetensors file, or several with their index.
        family: How the tensors are called.
        shape: What they should be.
        dtype: Of the weights; the files' without it.
        device: Where to.

    Raises:
        ConfigError: There are no safetensors files.
        ArtifactError: A file is damaged, or tensors are missing, superfluous or of another shape.
    """
    with torch.device("meta"):
        decoder = Decoder(shape)
    expected = {name: tensor.shape for name, tensor in decoder.state_dict().items()}
    theirs = {their_name(name, family): name for name in expected}
    files = _files(folder)
    _require_same(folder, set(theirs), set(files), family, tied=shape.tied_head)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(folder, {name: files[name] for name in theirs}, device):
        ours = theirs[name]
        if tensor.shape != expected[ours]:
            raise ArtifactError(
                f"{name} of {folder} is {list(tensor.shape)} and its config.json makes it "
                f"{list(expected[ours])}: fetch the model again"
            )
        found[ours] = tensor.to(dtype or tensor.dtype)
    decoder.load_state_dict(found, assign=True)
    return decoder.requires_grad_(False).eval()


def their_name(name: str, family: Family) -> str:
    """A family's name of one of our tensors."""
    module, _, kind = name.rpartition(".")
    number = _LAYER.match(name)
    pattern = family.names[_LAYER.sub("layers.{}.", module)]
    return f"{pattern.format(number[1] if number else '')}.{kind}"


def _files(folder: Path) -> dict[str, str]:
    """The file of every tensor."""
    if (folder / INDEX).is_file():
        try:
            listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(file) for name, file in listed.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(f"{folder / INDEX} is damaged: fetch the model again") from error
    if not (folder / SINGLE).is_file():
        raise ConfigError(f"{folder} has no weights in safetensors: save or fetch them so")
    with _opened(folder / SINGLE, torch.device("cpu")) as file:
        return dict.fromkeys(file.keys(), SINGLE)


def _tensors(
    folder: Path, files: dict[str, str], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor by name, one file after the other."""
    by_file: defaultdict[str, list[str]] = defaultdict(list)
    for name, file in files.items():
        by_file[file].append(name)
    for file, names in by_file.items():
        with _opened(folder / file, device) as opened:
            for name in names:
                yield name, _tensor(opened, name, folder / file)


def _tensor(opened: safe_open, name: str, path: Path) -> torch.Tensor:
    try:
        return opened.get_tensor(name)
    except SafetensorError as error:
        raise _damaged(path, error) from error


def _opened(path: Path, device: torch.device) -> safe_open:
    try:
        return safe_open(str(path), framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ArtifactError:
    return ArtifactError(f"{path} is damaged or missing ({error}): fetch the model again")


def _require_same(
    folder: Path, wanted: set[str], held: set[str], family: Family, *, tied: bool
) -> None:
    head = f"{family.names['head']}.weight"
    spare = {name for name in held - wanted if name.endswith(family.spare)}
    spare |= {head} if tied else set()
    for names, fault in ((wanted - held, "lack"), (held - wanted - spare, "hold, unexpected,")):
        if names:
            raise ArtifactError(
                f"the weights of {folder} {fault} {len(names)} tensors, such as {min(names)}: "
                "its config.json belongs to another model, or it must be fetched again"
            )
