"""What the commands that train have in common."""

from __future__ import annotations

import sys

import pytest

from kvfold.cli.train_place import progress_line, this_command
from kvfold.training import Progress


@pytest.mark.parametrize("out", [["--out", "/home/me/secret"], ["--out=/home/me/secret"]])
def test_a_command_leaves_out_where_to(out: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/kvfold", "train", *out, "sekv", "--texts", "a b"])
    assert this_command() == "kvfold train sekv --texts 'a b'"


def test_a_line_of_progress() -> None:
    at = Progress(
        step=3, total=10, metrics={"kl": 0.12345, "other": 1.0}, validation={"loss": 2.0},
        seconds_left=130.0,
    )  # fmt: skip
    expected = "step 3 of 10: kl 0.123, validation loss 2.000, 2 min left"
    assert progress_line(at, ("kl", "zoom"), "loss") == expected
