"""Files that the user names."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.cli.files import output_folder, read_text
from kvfold.errors import ConfigError


def test_text_is_read_as_utf8(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("zwölf\n".encode())
    assert read_text(tmp_path / "text") == "zwölf\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (b"caf\xe9", "not UTF-8 text \\(byte 3\\)"), (b" \n", "is empty")],
)
def test_unusable_text_is_refused(content: bytes | None, reason: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        read_text(tmp_path / "text")


def test_folder_instead_of_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        read_text(tmp_path)


def test_checking_an_output_folder_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    assert output_folder(str(tmp_path / "kept")) == tmp_path / "kept"
    assert output_folder(str(tmp_path / "new" / "deeper")) == tmp_path / "new" / "deeper"
    assert list(tmp_path.iterdir()) == [tmp_path / "kept"]
    assert list((tmp_path / "kept").iterdir()) == []


def test_output_folder_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot write to the folder"):
        output_folder(str(tmp_path / "file" / "out"))
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("name", ["", "  "])
def test_output_folder_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="output folder is empty"):
        output_folder(name)
