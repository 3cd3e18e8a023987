"""Trained gates as a file: weights, what they were trained on and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvfold.artifacts import finite, write_files
from kvfold.errors import ArtifactError
from kvfold.models import differing_shapes, fingerprint
from kvfold.models.hub import fetch_artifact, locate_artifact
from kvfold.tensorfile import digest_of, read_sealed, write_sealed
from kvfold.zoom.gates import Gates, GateShape

FORMAT = 1
"""Version of the file format."""
FILE = "sekv.safetensors"
"""Name of the file in a folder or a Hub repository."""
SHIPPED = Path(__file__).parent / "shipped" / FILE
"""The gates that come with the package, trained on the default model."""

_GAIN = "gain"
_WHOLE = "thresholds"
"""Kept in float32: in half precision, those near 1 would be 1."""
_MISSING = (
    "there are no gates at {name}: give a file or folder that `kvfold train sekv` wrote to its "
    "end, or a Hub repository such as owner/name"
)


@dataclass(frozen=True, slots=True)
class GatesArtifact:
    """Gates with their origin."""

    gates: Gates
    """What was trained."""
    trained_on: str
    """The model's name, for people."""
    facts: dict[str, object]
    """The model's shapes, as `kvfold.models.shape_facts` gives them."""
    fingerprint: str
    """Of the model, its weights included."""
    record: dict[str, object]
    """How they were trained: settings, data hashes, versions, seed, curve."""

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model of other shapes; a fine-tuned variant is taken.

        Raises:
            ArtifactError: Saying what differs.
        """
        if differing := differing_shapes(self.facts, model):
            raise ArtifactError(
                f"these gates were trained on {self.trained_on}, and this model differs "
                f"({differing}): train some with `kvfold train sekv`"
            )

    def digest(self) -> str:
        """SHA-256 of all that decides what is expanded, as it is written."""
        return digest_of("", _tensors(self.gates))

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the gates into a folder, whole or not at all; weights in half precision.

        Returns:
            The file.

        Raises:
            ArtifactError: When it cannot be written, or a weight is no number.
        """
        path, tensors = Path(folder) / FILE, _tensors(self.gates)
        _require_finite(path, tensors)
        header = {
            "format": FORMAT,
            "method": "sekv",
            "shape": asdict(self.gates.shape),
            "trained_on": self.trained_on,
            "facts": self.facts,
            "fingerprint": self.fingerprint,
            "record": finite(self.record),
        }
        write_files(path.parent, {})
        write_sealed(path, header, tensors)
        return path

    @classmethod
    def from_pretrained(cls, name: str | Path) -> GatesArtifact:
        """Read gates.

        Args:
            name: A file, a folder that holds one, or a Hub repository.

        Raises:
            ArtifactError: When there is none, or it is damaged, of another format or kind.
        """
        path = fetch_artifact(name, FILE, _MISSING)
        header, tensors = _read(path)
        _check_header(path, header)
        _require_finite(path, tensors)
        try:
            gates = Gates(GateShape(**header["shape"]), generator=torch.Generator())
            weights = {name: tensor.float() for name, tensor in tensors.items()}
            gates.load_state_dict(weights | {_GAIN: gates.gain})
            facts, record = dict(header["facts"]), dict(header["record"])
            origin = str(header["trained_on"]), facts, str(header["fingerprint"]), record
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{path} does not hold the weights and origin of sekv's gates: train them again"
            ) from error
        return cls(gates.eval().requires_grad_(False), *origin)


def shipped_gates(model: PreTrainedModel) -> GatesArtifact | None:
    """The gates that come with the package, if they were trained on this very model.

    Returns:
        None for any other model, which sekv then serves untrained.

    Raises:
        ArtifactError: When the file of the package is damaged.
    """
    if not SHIPPED.is_file():
        return None
    artifact = GatesArtifact.from_pretrained(SHIPPED)
    return artifact if artifact.fingerprint == fingerprint(model) else None


def locate(name: str | Path) -> str:
    """What the name of gates stands for, wherever the process may go; see `locate_artifact`."""
    return locate_artifact(name, FILE, _MISSING)


def _tensors(gates: Gates) -> dict[str, torch.Tensor]:
    """What is written, the gain within the routes."""
    state = {name: tensor.detach().cpu() for name, tensor in gates.state_dict().items()}
    state["route"] = state["route"] * state.pop(_GAIN)[..., None, None]
    return {
        name: tensor if name == _WHOLE else tensor.to(torch.float16)
        for name, tensor in state.items()
    }


def _require_finite(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise ArtifactError(f"the gates for {path} hold weights that are not numbers: train again")


def _read(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    try:
        return read_sealed(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is damaged or does not hold kvfold's gates ({error}): train or fetch them "
            "again"
        ) from error


def _check_header(path: Path, header: dict) -> None:
    if header.get("format") != FORMAT:
        raise ArtifactError(
            f"{path} has gates of format {header.get('format')}, this version reads {FORMAT}: "
            "train them again"
        )
    if header.get("method") != "sekv":
        raise ArtifactError(f"{path} is for method {header.get('method')}, not sekv")
