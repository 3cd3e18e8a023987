"""Diffusion models that kvfold makes itself: their names, and where they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvfold.errors import ConfigError
from kvfold.home import kvfold_home

OWN: Mapping[str, str] = {
    "arithmetic": "kvfold diffuse train-arithmetic",
    "arithmetic-shifted": "kvfold diffuse train-arithmetic --prediction shifted",
    "adapted": "kvfold diffuse adapt",
    "adapted-same": "kvfold diffuse adapt --prediction same",
}
"""Name: the command that makes the model."""
SHIPPED = Path(__file__).parent / "shipped"
"""Models that come with the package, a folder each."""
_FILES = ("config.json", "model.safetensors")


def own_home(name: str) -> Path:
    """The folder of a model in the user's folder, where a command puts it; it need not exist."""
    return kvfold_home() / "models" / f"diffusion-{name}"


def own_folder(name: str) -> Path:
    """The folder of a model in `OWN`: the user's goes before one that is shipped.

    Raises:
        ConfigError: It has not been made yet.
    """
    for folder in (own_home(name), SHIPPED / name):
        if all((folder / file).is_file() for file in _FILES):
            return folder
    raise ConfigError(f"the model {name!r} is not made yet: run `{OWN[name]}`")
