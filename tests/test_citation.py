"""The citation file cites four papers and says which of them this version does not have."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

import kvfold

CITATION = Path(__file__).parents[1] / "CITATION.cff"
LATER = "not part of this version yet"


def has_room(name: str) -> bool:
    return importlib.util.find_spec(f"kvfold.{name}") is not None


@pytest.mark.parametrize(
    ("paper", "is_here"),
    [
        ("2608.08878", "distill" in kvfold.methods()),
        ("2606.31145", has_room("zoom")),
        ("2606.07684", has_room("transfer")),
        ("2602.02544", has_room("diffusion")),
    ],
)
def test_notes_say_what_is_here(paper: str, is_here: bool) -> None:
    references = yaml.safe_load(CITATION.read_text(encoding="utf-8"))["references"]
    (notes,) = [each["notes"] for each in references if each["url"].endswith(paper)]
    assert (LATER not in notes) == is_here
