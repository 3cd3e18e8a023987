"""A checkpoint comes back bit for bit; what is not whole is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvfold import tensorfile
from kvfold.errors import ArtifactError, ConfigError
from kvfold.training import CHECKPOINT, Checkpoint, read_checkpoint
from kvfold.training import checkpoint as storage
from kvfold.training.checkpoint import (
    copied,
    find_checkpoint,
    load_optimiser_state,
    optimiser_state,
    require_same_run,
    versions,
    write_checkpoint,
)

GROUPS = ("module", "optimiser", "best", "extra")


def some_checkpoint() -> Checkpoint:
    tied = torch.arange(6.0).view(2, 3)
    return Checkpoint(
        step=2,
        seconds=0.1 + 0.2,
        curve=[
            {"step": 0, "train": {}, "validation": {"error": 1 / 3}},
            {"step": 1, "train": {"loss": 1e-300}, "validation": {}},
            {"step": 2, "train": {"loss": None}, "validation": {"error": 0.1}},
        ],
        best_step=2,
        best_metrics={"error": 0.1},
        identity={"data": "ü", "own": {"window": [1, None]}},
        settings={"steps": 9},
        versions=versions(),
        module=copied({"a.weight": tied, "a.tied": tied, "flag": torch.tensor(True)}),
        optimiser={
            "a.weight.exp_avg": torch.rand(3, 2, generator=torch.Generator().manual_seed(0)).T,
            "a.weight.step": torch.tensor(2.0),
        },
        best={"a.weight": torch.ones(2, 3, dtype=torch.bfloat16), "none": torch.zeros(0)},
        extra={},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_checkpoint(some_checkpoint(), tmp_path)


def test_it_comes_back(path: Path) -> None:
    written, found = some_checkpoint(), read_checkpoint(path)
    empty = {group: {} for group in GROUPS}
    assert replace(found, **empty) == replace(written, **empty)
    for group in GROUPS:
        one, two = getattr(written, group), getattr(found, group)
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            assert (two[name].dtype, two[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(two[name], tensor)
    assert [item.name for item in path.parent.iterdir()] == [CHECKPOINT]


def test_every_truncation_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(ArtifactError, match="is damaged or not a checkpoint of kvfold"):
            read_checkpoint(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(ArtifactError, match="is damaged"):
        read_checkpoint(path)


def test_every_flipped_bit_is_refused(path: Path) -> None:
    content = path.read_bytes()
    for place in range(0, len(content), 11):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            found = read_checkpoint(path)
        except ArtifactError:
            continue
        # Spaces that fill up the header mean nothing.
        assert content[place : place + 1] == b" ", place
        assert found.step == 2


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / CHECKPOINT
    for metadata in (None, {"kvfold": "[1]"}, {"kvfold": "[1]", "sha256": "0"}):
        save_file({"keys": torch.zeros(3)}, path, metadata)
        with pytest.raises(ArtifactError, match="not a checkpoint of kvfold"):
            read_checkpoint(path)
    for record in ("[1]", "{}", '{"format": 1}', "x"):
        digest = tensorfile.digest_of(record, {})
        save_file({}, path, {"kvfold": record, "sha256": digest})
        with pytest.raises(ArtifactError, match="not a checkpoint of kvfold"):
            read_checkpoint(path)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "FORMAT", 2)
        write_checkpoint(some_checkpoint(), tmp_path)
    with pytest.raises(ArtifactError, match="has checkpoint format 2, this version reads 1"):
        read_checkpoint(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ArtifactError):
        read_checkpoint(path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_write_leaves_the_old_checkpoint(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = path.read_bytes()

    def fails(tensors: object, name: Path, **options: object) -> None:
        name.write_bytes(b"half")
        raise error

    monkeypatch.setattr(tensorfile, "save_file", fails)
    with pytest.raises((ArtifactError, KeyboardInterrupt)):
        write_checkpoint(some_checkpoint(), path.parent)
    assert {item.name: item.read_bytes() for item in path.parent.iterdir()} == {CHECKPOINT: before}


def test_find_checkpoint(path: Path, tmp_path: Path) -> None:
    found = find_checkpoint(tmp_path, resume=True)
    assert found is not None
    assert found.step == 2
    with pytest.raises(ConfigError, match="resume it, or choose another"):
        find_checkpoint(tmp_path, resume=False)
    for resume in (False, True):
        assert find_checkpoint(tmp_path / "absent", resume=resume) is None
    assert not (tmp_path / "absent").exists()


def test_require_same_run() -> None:
    module = torch.nn.Linear(3, 2)
    weights = copied(module.state_dict())
    found = replace(some_checkpoint(), module=weights, best=weights)
    identity: dict[str, object] = {"data": "ü", "own": {"window": (1, None)}}
    require_same_run(found, identity=identity, settings={"steps": 9}, module=module)
    for changed in ({"data": "u"}, {"own": {}}, {"new": 1}):
        with pytest.raises(ArtifactError, match=f"of another run .{next(iter(changed))} "):
            require_same_run(
                found, identity={**identity, **changed}, settings={"steps": 9}, module=module
            )
    with pytest.raises(ConfigError, match="steps 9 there, 10 here"):
        require_same_run(found, identity=identity, settings={"steps": 10}, module=module)
    fewer = replace(found, best={"weight": weights["weight"]})
    with pytest.raises(ArtifactError, match=r"other weights \(bias None there, \[2\] here\)"):
        require_same_run(fewer, identity=identity, settings={"steps": 9}, module=module)


def test_an_optimiser_goes_on_where_it_was() -> None:
    def update(module: torch.nn.Module, optimiser: torch.optim.Optimizer) -> None:
        optimiser.zero_grad()
        (module(torch.ones(1, 3)) ** 2).sum().backward()
        optimiser.step()

    one, two = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    first, second = (torch.optim.AdamW(module.parameters(), lr=0.1) for module in (one, two))
    for _ in range(3):
        update(one, first)
    state = optimiser_state(first, one)
    names = {f"{name}.{key}" for name in ("weight", "bias") for key in ("step", "exp_avg")}
    assert names < set(state)
    two.load_state_dict(one.state_dict())
    load_optimiser_state(second, two, state)
    for _ in range(3):
        update(one, first)
        update(two, second)
    assert torch.equal(one.weight, two.weight)
    # The copy did not follow either of them.
    assert float(state["weight.step"]) == 3
