"""A codec as a file: its tensors, the two models it is for, and how it was calibrated."""

from __future__ import annotations

from pathlib import Path

import torch

from kvfold.artifacts import finite, write_files
from kvfold.errors import ArtifactError, ConfigError
from kvfold.tensorfile import read_sealed, write_sealed
from kvfold.transfer.codec import Codec
from kvfold.transfer.coder import Coder, translators
from kvfold.transfer.storage import Facts, coder_of, facts_of, row_width, tensors_of

FORMAT = 1
"""Version of the file format."""
FILE = "codec.safetensors"
"""Name of the file in a folder."""
SHIPPED_NAME = "shipped"
"""What the codec that comes with the package is called."""
SHIPPED = Path(__file__).parent / "shipped" / FILE
"""That codec, from the default model to `specialist`."""

_TENSOR_ERRORS = (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError)


def save_codec(codec: Codec, folder: Path) -> Path:
    """Write a codec into a folder that is made if it is missing, whole or not at all.

    Returns:
        The file.

    Raises:
        ArtifactError: When it cannot be written.
    """
    header = {
        "format": FORMAT,
        "method": "scd",
        "producer": codec.producer,
        "consumer": codec.consumer,
        "tokenizer": codec.tokenizer,
        "coders": facts_of(codec.coders),
        "record": finite(codec.record),
    }
    write_files(folder, {})
    write_sealed(folder / FILE, header, tensors_of(codec.coders))
    return folder / FILE


def load_codec(path: Path) -> Codec:
    """Read a codec.

    Args:
        path: The file, or the folder that holds it; `shipped` for the one of the package, where
            there is no such file or folder.

    Raises:
        ArtifactError: When there is none, or it is damaged or of another format.
    """
    if path == Path(SHIPPED_NAME) and not path.exists():
        path = SHIPPED
    path = path / FILE if path.is_dir() else path
    header, tensors = _read(path)
    if header.get("format") != FORMAT or header.get("method") != "scd":
        raise ArtifactError(
            f"{path} is of format {header.get('format')} for {header.get('method')}, this version "
            f"reads {FORMAT} for scd: calibrate it again"
        )
    try:
        coders = tuple(
            coder_of(layer, facts, tensors) for layer, facts in enumerate(header["coders"])
        )
        producer, consumer = dict(header["producer"]), dict(header["consumer"])
        record, tokenizer = dict(header["record"]), str(header["tokenizer"])
        _check_shapes(coders, producer, consumer)
    except (*_TENSOR_ERRORS, ConfigError) as error:
        raise ArtifactError(f"{path} does not hold a codec ({error}): calibrate it again") from (
            error
        )
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ArtifactError(f"{path} holds numbers that are not finite: calibrate it again")
    return Codec(coders, producer, consumer, tokenizer, record)


def _read(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    try:
        return read_sealed(path)
    except FileNotFoundError as error:
        raise ArtifactError(
            f"there is no codec at {path}: give a file or folder that a calibration wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is damaged or not a kvfold codec ({error}): calibrate or fetch it again"
        ) from error


def _check_shapes(coders: tuple[Coder, ...], producer: Facts, consumer: Facts) -> None:
    """Refuse coders whose rows are not those of the two models."""
    if not len(coders) == producer["layers"] == consumer["layers"]:
        raise ValueError(f"{len(coders)} layers, but its models have {consumer['layers']}")
    for layer, coder in enumerate(coders):
        for name, translator in translators(coder).items():
            found = [translator.heads * len(side) for side in (translator.mean, translator.offset)]
            wanted = [row_width(facts, name) for facts in (producer, consumer)]
            if found != wanted:
                raise ValueError(f"layer {layer} has {name} rows of {found}, its models {wanted}")
