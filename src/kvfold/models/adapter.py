"""A fine-tuned model as a small file: the low-rank changes of a base model's weights (LoRA).

A weight `W` of the base becomes `W + scale * up @ down` when the adapter is loaded, so that whoever
uses the model sees a plain one. The sum is taken in float64, so that it is the same on every
machine: a codec is for exactly these weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvfold.artifacts import finite, write_files
from kvfold.errors import ArtifactError
from kvfold.home import public_name
from kvfold.models.fingerprint import differing_shapes, fingerprint
from kvfold.tensorfile import read_sealed, write_sealed

FORMAT = 1
"""Version of the file format."""
FILE = "adapter.safetensors"
"""Name of the file in a folder."""
SHIPPED: Mapping[str, Path] = {
    "specialist": Path(__file__).parents[1] / "transfer" / "shipped" / FILE,
}
"""Name: the adapter of a model that comes with the package."""

DOWN, UP = "down", "up"
"""Ends of the names of tensors: what reads, and what writes."""

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterArtifact:
    """Changes of a base model's weights, with their origin."""

    changes: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """By the name of a linear layer: down `[R, inputs]` and up `[outputs, R]`."""
    scale: float
    """Factor of their product."""
    base: str
    """What the base model is loaded by."""
    facts: dict[str, object]
    """Its shapes, as `kvfold.models.shape_facts` gives them."""
    fingerprint: str
    """Of the base model, its weights included."""
    record: dict[str, object]
    """How it was trained: settings, data hashes, versions, seed, curve."""

    @torch.no_grad()
    def merge(self, model: PreTrainedModel) -> None:
        """Change a base model's weights, in float32 or more, in place.

        Raises:
            ArtifactError: For a model of other shapes than the base. One of other weights is taken,
                with a warning.
        """
        self._check(model)
        try:
            for name, (down, up) in self.changes.items():
                weight = model.get_parameter(f"{name}.weight")
                weight.copy_(changed(weight, down, up, self.scale))
        except (AttributeError, RuntimeError) as error:
            raise ArtifactError(
                f"the adapter changes layers that {public_name(self.base)} does not have "
                f"({error}): train it again"
            ) from error

    def _check(self, model: PreTrainedModel) -> None:
        name = public_name(self.base)
        if differing := differing_shapes(self.facts, model):
            raise ArtifactError(
                f"the adapter was trained on {name}, and this model differs ({differing}): train "
                "one with `kvfold transfer specialise`"
            )
        if self.fingerprint != fingerprint(model):
            _LOGGER.warning(
                "the adapter was trained on other weights of %s than these: what was measured of "
                "it does not hold, and codecs made for it refuse it",
                name,
            )

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the adapter into a folder, whole or not at all; weights in half precision.

        Returns:
            The file.

        Raises:
            ArtifactError: When it cannot be written, or a weight is no number.
        """
        path = Path(folder) / FILE
        tensors = {
            f"{name}.{end}": tensor.detach().cpu().to(torch.float16)
            for name, pair in self.changes.items()
            for end, tensor in zip((DOWN, UP), pair, strict=True)
        }
        _require_finite(path, tensors)
        header = {
            "format": FORMAT,
            "method": "lora",
            "scale": self.scale,
            "base": self.base,
            "facts": self.facts,
            "fingerprint": self.fingerprint,
            "record": finite(self.record),
        }
        write_files(path.parent, {})
        write_sealed(path, header, tensors)
        return path

    @classmethod
    def from_pretrained(cls, path: Path) -> AdapterArtifact:
        """Read an adapter from its file.

        Raises:
            ArtifactError: When it is damaged, or of another format or kind.
        """
        header, tensors = _read(path)
        if header.get("format") != FORMAT or header.get("method") != "lora":
            raise ArtifactError(
                f"{path} is of format {header.get('format')} for {header.get('method')}, this "
                f"version reads {FORMAT} for lora: train it again"
            )
        _require_finite(path, tensors)
        try:
            names = [name.removesuffix(f".{UP}") for name in tensors if name.endswith(f".{UP}")]
            changes = {name: (tensors[f"{name}.{DOWN}"], tensors[f"{name}.{UP}"]) for name in names}
            if not changes or 2 * len(changes) != len(tensors):
                raise ValueError("its tensors are no pairs")
            facts, record = dict(header["facts"]), dict(header["record"])
            base, seal = str(header["base"]), str(header["fingerprint"])
            return cls(changes, float(header["scale"]), base, facts, seal, record)
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} does not hold an adapter ({error}): train it again") from (
                error
            )


def changed(
    weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scale: float
) -> torch.Tensor:
    """A weight with its low-rank change, in float64.

    Args:
        weight: `[outputs, inputs]`.
        down: `[R, inputs]`.
        up: `[outputs, R]`.
        scale: Factor of their product.
    """
    return weight.double() + scale * (up.double() @ down.double())


def find_adapter(name: str | Path) -> Path | None:
    """The file of the adapter that a model's name stands for; None where it is another model's.

    Args:
        name: One in `SHIPPED`, or a folder that `kvfold transfer specialise` wrote.
    """
    if str(name) in SHIPPED:
        return SHIPPED[str(name)]
    path = Path(name).expanduser() / FILE
    return path if str(name).strip() and path.is_file() else None


def _read(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    try:
        return read_sealed(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is damaged or not an adapter of kvfold ({error}): train or fetch it again"
        ) from error


def _require_finite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise ArtifactError(
            f"the adapter {path} holds weights that are not numbers: train it again"
        )
