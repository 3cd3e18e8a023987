"""Fixtures of the tests of `kvfold.zoom`."""

from __future__ import annotations

import pytest

from tests.zoom.running import leave_to_torch


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel: numbers are those of torch to the last bit, and expanded spans stay in a pool."""
    leave_to_torch(monkeypatch)
