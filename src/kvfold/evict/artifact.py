"""A trained policy as a file: weights, what they were trained on and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvfold.artifacts import finite, write_files
from kvfold.errors import ArtifactError
from kvfold.evict.features import FEATURES
from kvfold.evict.network import PolicyNetwork
from kvfold.models.hub import fetch_artifact, locate_artifact
from kvfold.tensorfile import digest_of, read_sealed, write_sealed

FORMAT = 3
"""Version of the file format."""
IMPORTANCE = "importance"
"""Name of the tensor beside the network's weights."""
FILE = "distill.safetensors"
"""Name of the file in a folder or a Hub repository."""
SHIPPED = Path(__file__).parent / "shipped" / FILE
"""The policy that comes with the package, trained on the default model."""

_MISSING = (
    "there is no policy at {name}: give a file or folder that `kvfold train distill` wrote to its "
    "end, or a Hub repository such as owner/name"
)


@dataclass(frozen=True, slots=True)
class PolicyArtifact:
    """A policy network with its origin."""

    network: PolicyNetwork
    """Scores tokens."""
    importance: torch.Tensor
    """What each kv head that keeps everything is worth, `[L, G]` in nats (layers that evict)."""
    trained_on: str
    """The model's name, for people."""
    facts: dict[str, object]
    """The model's shapes, as `kvfold.models.shape_facts` gives them."""
    record: dict[str, object]
    """How it was trained: settings, data hashes, versions, seed, curve."""

    @property
    def scope(self) -> str:
        """What shares one kept set, as it was trained."""
        identity = self.record.get("identity")
        settings = identity.get("settings") if isinstance(identity, dict) else None
        return str(settings.get("scope", "layer")) if isinstance(settings, dict) else "layer"

    def digest(self) -> str:
        """SHA-256 of all that decides what is kept."""
        return digest_of("", self._tensors())

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**self.network.state_dict(), IMPORTANCE: self.importance}

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

        path = Path(folder) / FILE
        write_files(path.parent, {})
        write_sealed(path, header, self._tensors())
        return path

    @classmethod
    def from_pretrained(cls, name: str | Path) -> PolicyArtifact:
        """Read a policy.

        Args:
            name: A file, a folder that holds one, or a Hub repository.

        Raises:
            ArtifactError: When there is none, or it is damaged, of another format or kind.
        """
        path = fetch_artifact(name, FILE, _MISSING)
        header, weights = _read(path)
        _check_header(path, header)
        is_finite = all(bool(torch.isfinite(weight).all()) for weight in weights.values())
        try:
            network = PolicyNetwork(generator=torch.Generator())
            importance = weights.pop(IMPORTANCE)
            network.load_state_dict(weights)
            facts, record = dict(header["facts"]), dict(header["record"])
            trained_on = str(header["trained_on"])
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{path} does not hold the weights and origin of a distill policy: train it again"
            ) from error
        if not is_finite:
            raise ArtifactError(f"{path} holds weights that are not numbers: train it again")
        if not (network.scale > 0).all() or not ((network.used == 0) | (network.used == 1)).all():
            raise ArtifactError(
                f"{path} scales its features by numbers that no training gives: train it again"
            )
        if importance.ndim != 2 or not importance.is_floating_point():
            raise ArtifactError(
                f"{path} does not give each kv head of each layer its importance: train it again"
            )
        if (heads := _pruned_heads(facts)) is not None and importance.shape != heads:
            raise ArtifactError(
                f"{path} gives the importance of {list(importance.shape)} heads, but its model has "
                f"{list(heads)}: train it again"
            )
        network.eval().requires_grad_(False)
        return cls(network, importance, trained_on, facts, record)


def _pruned_heads(facts: dict[str, object]) -> tuple[int, int] | None:
    """Full-attention layers and kv heads of the model that a policy was trained on, if told."""
    windows, heads = facts.get("windows"), facts.get("kv_heads")
    if not isinstance(windows, list) or not isinstance(heads, int):
        return None
    return sum(window is None for window in windows), heads


def locate(name: str | Path) -> str:
    """What a policy's name stands for, wherever the process may go; see `locate_artifact`."""
    return locate_artifact(name, FILE, _MISSING)


def _read(path: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    try:
        return read_sealed(path)
    except (OSError, ValueError) as error:
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
