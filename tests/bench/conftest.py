"""Fixtures of the bench's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.bench.fakes import FakeRunner, save_tiny


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """`saved(kind)`: the folder of a tiny model with its tokenizer."""
    folders: dict[str, str] = {}

    def folder_of(kind: str = "llama") -> str:
        if kind not in folders:
            folders[kind] = str(save_tiny(tmp_path_factory.mktemp(kind), kind))
        return folders[kind]

    return folder_of


@pytest.fixture
def runner() -> FakeRunner:
    """A runner that starts no process."""
    return FakeRunner()
