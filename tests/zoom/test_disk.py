"""The slow tier on a disk: a file that grows, is read in places, and goes with the cache."""

from __future__ import annotations

import copy
import errno
import gc
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import kvfold
from kvfold.errors import ArtifactError, ConfigError
from kvfold.zoom.disk import DiskTier
from kvfold.zoom.token_file import HEADER, TokenFile
from tests.contract import assert_close
from tests.tiny import tiny_ids
from tests.zoom.running import layers_of, one_by_one, run, wide
from tests.zoom.slow import WIDTH, Filled, assert_apart, folded

LONGEST = 12
UNEVEN = [[[5, 12, 1], [7]], [[3, 3], [12, 11]], [[10], [4]]]


def uneven(folder: Path, dtype: torch.dtype = torch.float16) -> Filled:
    folds = [folded(each, seed, dtype=dtype) for seed, each in enumerate(UNEVEN)]
    return Filled(DiskTier(folder, LONGEST), folds)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_it_gives_back_what_it_was_given(dtype: torch.dtype, tmp_path: Path):
    held = uneven(tmp_path, dtype)
    assert torch.equal(*held.given())
    assert held.tier.width == 2 * WIDTH
    for side in ("keys", "values"):
        assert torch.equal(getattr(held.tier, side), getattr(held.raw, side))


def test_the_file_is_safetensors(tmp_path: Path):
    held = uneven(tmp_path)
    (path,) = files(tmp_path)
    assert path == held.tier.path
    with safe_open(path, framework="pt") as file:
        tokens = file.get_tensor("tokens")
        length = int(file.metadata()["length"])
    assert length == len(held.tier)
    expected = torch.cat([held.raw.keys, held.raw.values], dim=-1).permute(2, 0, 1, 3)
    assert torch.equal(tokens[:length], expected)
    assert not tokens[length:].any()
    assert path.stat().st_size == held.tier.nbytes == HEADER + tokens.nbytes


def test_it_grows_without_being_rewritten(tmp_path: Path):
    held = Filled(DiskTier(tmp_path, LONGEST), [folded([[9] * 50], 0)])
    path = held.tier.path
    inode, before = path.stat().st_ino, path.read_bytes()[HEADER:]
    looked = held.tier.keys.clone()
    views = held.tier.keys
    held.tier.add(folded([[9]], 1))
    large = path.stat().st_size
    held.tier.add(folded([[3]], 2))
    assert path.stat().st_ino == inode
    assert path.stat().st_size == large, "there was room"
    assert path.read_bytes()[HEADER:][: len(before)] == before
    assert torch.equal(views, looked)


def test_no_other_token_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is brought is chosen within the mapped file, before anything is copied."""
    held, chosen = uneven(tmp_path), []
    plain = torch.Tensor.index_select

    def spy(tensor: torch.Tensor, dim: int, where: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1] == 2 * WIDTH:
            chosen.append((tensor.data_ptr(), set(where.tolist())))
        return plain(tensor, dim, where)

    wanted = held.wanted()
    first = type(wanted)(*(getattr(wanted, name)[:1] for name in wanted.__slots__))
    monkeypatch.setattr(torch.Tensor, "index_select", spy)
    held.tier.fetch(first)
    ((place, rows),) = chosen
    assert place == held.tier._file.tokens.data_ptr()
    assert len(rows) == int(first.lengths)


def test_rows_that_move(tmp_path: Path):
    held, plain = uneven(tmp_path), uneven(tmp_path)
    order = torch.tensor([1, 1, 0])
    for each in (held.tier, held.raw):
        each.map(lambda tensor: tensor.index_select(0, order))
    held.lengths, held.starts = held.lengths[order], held.starts[order]
    assert torch.equal(*held.given())
    assert torch.equal(held.tier.keys, held.raw.keys)
    new = folded([[4, 2], [5, 1], [6]], 7, dtype=torch.float16)
    start = len(held.raw)
    for each in (held.tier, held.raw):
        each.add(new)
    held.lengths = torch.cat([held.lengths, new.lengths], dim=1)
    held.starts = torch.cat([held.starts, new.lengths.cumsum(1) - new.lengths + start], dim=1)
    assert torch.equal(*held.given())
    assert torch.equal(held.tier.keys, held.raw.keys)
    assert len(files(tmp_path)) == 2, "the file before is gone"
    assert torch.equal(*plain.given())


def test_a_copy_has_a_file_of_its_own(tmp_path: Path):
    held = uneven(tmp_path)
    other = copy.deepcopy(held.tier)
    assert len(files(tmp_path)) == 2
    assert_apart(held.tier, other)


def test_state(tmp_path: Path):
    held = uneven(tmp_path)
    read = DiskTier(tmp_path, LONGEST)
    read.load(dict(held.tier.state()))
    held.tier = read
    assert torch.equal(*held.given())


def test_files_go_with_what_holds_them(tmp_path: Path):
    held = uneven(tmp_path)
    other = copy.deepcopy(held.tier)
    del held
    gc.collect()
    assert files(tmp_path) == [other.path]
    del other
    gc.collect()
    assert files(tmp_path) == []


# In a cache -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("torch_alone")
def test_a_cache_on_a_disk_says_what_one_in_memory_says(tmp_path: Path):
    pieces = [tiny_ids(2, 300), *one_by_one(tiny_ids(2, 40, seed=1))]
    held = kvfold.make_cache(wide(), "sekv", budget=0.4, disk=tmp_path)
    plain = kvfold.make_cache(wide(), "sekv", budget=0.4)
    assert files(tmp_path) == []
    assert torch.equal(run(wide(), held, pieces), run(wide(), plain, pieces))
    assert len(files(tmp_path)) == 2
    on_disk = sum(path.stat().st_size for path in files(tmp_path))
    others = sum(layer.spans.router.bytes_slow for layer in layers_of(held))
    assert held.report().bytes_slow == on_disk + others
    assert held.report().bytes_fast == plain.report().bytes_fast
    held.reset()
    gc.collect()
    assert files(tmp_path) == []


def test_a_file_of_a_cache_names_its_folder(tmp_path: Path):
    folder = tmp_path / "slow"
    folder.mkdir()
    held = kvfold.make_cache(wide(), "sekv", budget=0.4, disk=folder)
    run(wide(), held, [tiny_ids(1, 300)])
    held.save(tmp_path / "cache.safetensors")
    loaded = kvfold.load_cache(tmp_path / "cache.safetensors", wide())
    assert loaded.spec.options["disk"] == str(folder)
    assert len(files(folder)) == 4
    follow = one_by_one(tiny_ids(1, 30, seed=2))
    assert_close(run(wide(), loaded, follow), run(wide(), held, follow))


def test_a_file_of_a_cache_is_read_where_the_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "slow"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    held = kvfold.make_cache(wide(), "sekv", budget=0.4, disk="slow")
    run(wide(), held, [tiny_ids(1, 300)])
    held.save(tmp_path / "cache.safetensors")
    expected = run(wide(), held, one_by_one(tiny_ids(1, 30, seed=2)))
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="give a folder that exists"):
        kvfold.load_cache(tmp_path / "cache.safetensors", wide())
    loaded = kvfold.load_cache(tmp_path / "cache.safetensors", wide(), disk=None)
    assert_close(run(wide(), loaded, one_by_one(tiny_ids(1, 30, seed=2))), expected)


def refuse(code: int) -> object:
    def allocate(file: int, start: int, size: int) -> None:
        raise OSError(code, os.strerror(code))

    return allocate


@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize("start", ["prompt", "later"])
def test_a_full_disk_loses_nothing(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before any layer has folded; once there is room it goes on as if nothing had happened."""
    pieces = [tiny_ids(2, 300), *one_by_one(tiny_ids(2, 60, seed=1))]
    held = kvfold.make_cache(wide(), "sekv", budget=0.4, disk=tmp_path)
    expected = run(wide(), kvfold.make_cache(wide(), "sekv", budget=0.4), pieces)
    done = 0
    if start == "later":
        done = 2
        assert torch.equal(run(wide(), held, pieces[:done]), expected[:, :done])
    failures = 0
    while done < len(pieces):
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC), raising=False)
            try:
                run(wide(), held, [pieces[done]])
                done += 1
                continue
            except ArtifactError as error:
                message = str(error)
        failures += 1
        assert "cannot hold the slow tier (No space left on device): make room" in message
        assert "\n" not in message
        # The tokens of that forward are held, exactly; they are folded as soon as that is possible.
        done += 1
        assert held.get_seq_length() == 300 + done - 1
        logits = run(wide(), held, pieces[done : done + 1])
        assert_close(logits, expected[:, done : done + 1])
        done += 1
    assert failures >= 1


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="room is not taken in advance")
def test_where_room_cannot_be_taken_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By zeros, so that a full disk is noticed before any layer has changed."""
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.EOPNOTSUPP))
    assert torch.equal(*uneven(tmp_path).given())
    file = TokenFile(tmp_path, (1, 2, 64), torch.float32)
    file.reserve(5000)
    held = file.path.stat()
    assert held.st_size == file.nbytes > 2 << 20
    assert held.st_blocks * 512 >= held.st_size


def test_a_folder_that_is_gone(tmp_path: Path):
    folder = tmp_path / "slow"
    folder.mkdir()
    held = kvfold.make_cache(wide(), "sekv", budget=0.4, disk=folder)
    folder.rmdir()
    with pytest.raises(ArtifactError, match=r"slow cannot hold the slow tier \(No such file"):
        run(wide(), held, [tiny_ids(1, 300)])
    folder.mkdir()
    logits = run(wide(), held, [tiny_ids(1, 1)])
    plain = kvfold.make_cache(wide(), "sekv", budget=0.4)
    expected = run(wide(), plain, [tiny_ids(1, 300), tiny_ids(1, 1)])
    assert_close(logits[:, -1], expected[:, -1])


def test_what_is_no_folder_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for disk in (tmp_path / "file", tmp_path / "none", 3):
        with pytest.raises(ConfigError, match="give a folder that exists"):
            kvfold.make_cache(wide(), "sekv", budget=0.4, disk=disk)
