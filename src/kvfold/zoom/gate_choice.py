"""Which gates a cache uses: given ones, those that come with the package, or none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from kvfold.errors import ConfigError
from kvfold.zoom.gates import Gates
from kvfold.zoom.gates_artifact import GatesArtifact, locate, shipped_gates

DEFAULTS: dict[str, object] = {"gates": None, "digest": None}
"""The options of gates: their name, and the hash of their weights to be warned of others."""
NOTHING = "none"
"""The name of no gates."""

_logger = logging.getLogger(__name__)


def choose_gates(
    model: PreTrainedModel, method: str, options: Mapping[str, object]
) -> tuple[Gates | None, dict[str, object]]:
    """Find the gates that were asked for, or that come with the package for this model.

    Args:
        model: That they are for.
        method: Its registered name.
        options: All of the method's, those that were not given as they are by default.

    Returns:
        The gates, and the options by which a saved cache finds them again; empty without gates.

    Raises:
        ConfigError: When nothing of the method uses gates, or their name is none.
        ArtifactError: When there are none of that name, or they are another model's.
    """
    name, digest = options["gates"], options["digest"]
    routes, ranks = options["routing"] == "summary", options["factors"] == "head"
    if name is not None and not (routes or ranks):
        raise ConfigError(
            f"{method}: gates are for routing=summary, or for the ranks of factors=head, not for "
            f"routing={options['routing']} with factors={options['factors']}"
        )
    if not isinstance(digest, str | None):
        raise ConfigError(f"{method}: digest is {digest!r}, give the SHA-256 as a string")
    if name == NOTHING or (name is None and not routes):
        return None, {}
    if name is None:
        artifact, settled = shipped_gates(model), {}
    elif isinstance(name, str | Path):
        artifact, settled = GatesArtifact.from_pretrained(name), {"gates": locate(name)}
        artifact.check(model)
    else:
        raise ConfigError(f"{method}: gates is {name!r}, give a file, a folder, or {NOTHING}")
    if artifact is None:
        return None, {"gates": NOTHING}
    found = artifact.digest()
    if digest not in (None, found):
        _logger.warning(
            "%s: the gates are others than those the cache was made with: what is expanded from "
            "now on is chosen by the new ones",
            method,
        )
    return artifact.gates.to(model.device), {**settled, "digest": found}
