"""A trained policy as a file: weights, what they were trained on and how."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvfold.artifacts import finite, write_files
from kvfold.errors import ArtifactError
from kvfold.evict.features import FEATURES
from kvfold.evict.network import PolicyNetwork

FORMAT = 1
"""Version of the file format."""
FILE = "distill.safetensors"
"""Name of the file in a folder or a Hub repository."""
SHIPPED = Path(__file__).parent / "shipped" / FILE
"""The policy that comes with the package, trained on the default model."""


@dataclass(frozen=True, slots=True)
class PolicyArtifact:
    """A policy network with its origin."""

    network: PolicyNetwork
    """Scores tokens."""
    trained_on: str
    """The model's name, for people."""
    facts: dict[str, object]
    """The model's shapes, as `kvfold.models.shape_facts` gives them."""
    record: dict[str, object]
    """How it was trained: settings, data hashes, versions, seed, curve."""

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write the policy into a folder, whole or not at all.

        Returns:
            The file.

        Raises:
            ArtifactError: When it cannot be written.
        """
        header = {
            "format": FORMAT,
            "method": "distill",
            "features": list(FEATURES),
            "trained_on": self.trained_on,
            "facts": self.facts,
            "record": finite(self.record),
        }

        def save(temporary: Path) -> None:
            tensors = {name: t.contiguous() for name, t in self.network.state_dict().items()}
            try:
                save_file(tensors, temporary, metadata={"kvfold": json.dumps(header)})
            except SafetensorError as error:
                raise OSError(str(error)) from error

        return write_files(Path(folder), {FILE: save})[0]

    @classmethod
    def from_pretrained(cls, name: str | Path) -> PolicyArtifact:
        """Read a policy.

        Args:
            name: A file, a folder that holds one, or a Hub repository.

        Raises:
            ArtifactError: When there is none, or it is damaged, of another format or kind.
        """
        path = _find(name)
        header, weights = _read(path)
        _check_header(path, header)
        try:
            network = PolicyNetwork()
            network.load_state_dict(weights)
            facts, record = dict(header["facts"]), dict(header["record"])
            trained_on = str(header["trained_on"])
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{path} does not hold the weights and origin of a distill policy: train it again"
            ) from error
        if not all(bool(torch.isfinite(weight).all()) for weight in weights.values()):
            raise ArtifactError(f"{path} holds weights that are not numbers: train it again")
        return cls(network.eval().requires_grad_(False), trained_on, facts, record)


def _find(name: str | Path) -> Path:
    path = Path(name)
    if path.is_dir():
        path = path / FILE
    if path.is_file():
        return path
    if isinstance(name, Path) or name.count("/") != 1 or path.is_absolute():
        raise ArtifactError(
            f"there is no policy at {name}: give a file or folder that `kvfold train distill` "
            "wrote, or a Hub repository such as owner/name"
        )
    try:
        return Path(hf_hub_download(name, FILE))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ArtifactError(
            f"there is no folder {name}, and the Hub gave no {FILE} of that name: check it"
        ) from error


def _read(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    try:
        with safe_open(str(path), framework="pt") as file:
            header = json.loads((file.metadata() or {})["kvfold"])
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if not isinstance(header, dict):
            raise ValueError("its header is no record")
        return header, weights
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ArtifactError(
            f"{path} is damaged or not a kvfold policy ({error}): train it or fetch it again"
        ) from error


def _check_header(path: Path, header: dict) -> None:
    if header.get("format") != FORMAT:
        raise ArtifactError(
            f"{path} has policy format {header.get('format')}, this version reads {FORMAT}: train "
            "it again"
        )
    if header.get("method") != "distill":
        raise ArtifactError(f"{path} is for method {header.get('method')}, not distill")
    if header.get("features") != list(FEATURES):
        raise ArtifactError(
            f"{path} was trained on the features {header.get('features')}, this version has "
            f"{list(FEATURES)}: train it again"
        )
