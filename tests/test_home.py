"""Names of models, as others may read them."""

from pathlib import Path

import pytest

from kvfold.home import DEFAULT_NAME, public_name


def test_a_model_is_named_without_the_folders_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path / "tiny")
    assert public_name("default") == DEFAULT_NAME
    assert [public_name(name) for name in (str(tmp_path / "tiny"), "../tiny/", ".")] == ["tiny"] * 3
    assert public_name("owner/name") == "owner/name"
