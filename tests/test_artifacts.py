"""Files that are whole or not there, strict JSON, sizes as a person reads them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvfold.artifacts import format_bytes, json_text, write_files, write_whole
from kvfold.errors import ArtifactError


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        write_whole(tmp_path / "file", lambda path, content=content: path.write_bytes(content))
        assert contents(tmp_path) == {"file": content}


@pytest.mark.skipif(os.name == "nt", reason="file modes")
def test_whoever_writes_it_others_can_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_whole(tmp_path / "text", lambda path: path.write_text("x"))
    write_whole(tmp_path / "tensors", lambda path: save_file({"a": torch.zeros(1)}, path))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {stat.S_IMODE((tmp_path / "plain").stat().st_mode)}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise error

    with pytest.raises((ArtifactError, KeyboardInterrupt)):
        write_whole(tmp_path / "file", fail)
    assert contents(tmp_path) == {"file": b"old"}


def test_a_failed_rename_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArtifactError):
        write_whole(tmp_path / "folder", lambda path: path.write_bytes(b"x"))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "file"
    with pytest.raises(ArtifactError) as caught:
        write_whole(path, lambda path: path.write_bytes(b"x"))
    assert str(caught.value) == (
        f"cannot write {path} (No such file or directory): choose a folder that exists, may be "
        "written and has room"
    )


def test_files_go_into_a_folder_that_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "deeper"
    paths = write_files(
        folder, {"a": lambda path: path.write_text("1"), "b": lambda path: path.write_text("2")}
    )
    assert paths == (folder / "a", folder / "b")
    assert contents(folder) == {"a": b"1", "b": b"2"}
    with pytest.raises(ArtifactError, match="cannot write"):
        write_files(folder / "a" / "below", {})


def test_json_is_strict() -> None:
    text = json_text({"a": float("nan"), "b": [float("-inf"), 1.5], 3: ("é", None, True)})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "3": ["é", None, True]}
    assert text.endswith("}\n")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (3 * 2**20, "3.0 MiB"), (2**42, "4.0 TiB")],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
