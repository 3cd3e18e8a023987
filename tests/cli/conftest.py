"""Settings of the command line's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers.utils import logging


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' bars off standard error, as the environment does in a real process."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
