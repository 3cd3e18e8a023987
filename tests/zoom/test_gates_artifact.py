"""Trained gates as files: what is written is read back, and nothing else is taken."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvfold.errors import ArtifactError
from kvfold.models import DEFAULT_NAME, fingerprint, shape_facts
from kvfold.tensorfile import digest_of
from kvfold.zoom import gates_artifact
from kvfold.zoom.gates import Gates, GateShape
from kvfold.zoom.gates_artifact import FILE, SHIPPED, GatesArtifact, locate, shipped_gates
from tests.contract import attached
from tests.zoom.test_gates import made

SHAPE = GateShape(layers=3, query_heads=4, head_dim=16)


def artifact(gates: Gates | None = None) -> GatesArtifact:
    model = attached()
    gates = made(shape=SHAPE) if gates is None else gates
    return GatesArtifact(gates, "tiny", shape_facts(model), fingerprint(model), {"steps": 3})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    artifact().save_pretrained(tmp_path)
    return tmp_path


def rewrite(path: Path, *, header: dict | None = None, tensors: dict | None = None) -> None:
    """Change parts of the header, or some tensors, with a checksum that matches."""
    with safe_open(str(path), framework="pt") as file:
        told = json.loads(file.metadata()["kvfold"])
        held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text, held = json.dumps(told | (header or {})), held | (tensors or {})
    save_file(held, path, metadata={"kvfold": text, "sha256": digest_of(text, held)})


def test_what_is_written_is_read_back(folder: Path) -> None:
    written, read = artifact(), GatesArtifact.from_pretrained(folder)
    assert (read.trained_on, read.record) == ("tiny", {"steps": 3})
    assert (read.facts, read.fingerprint) == (written.facts, written.fingerprint)
    assert read.digest() == written.digest()
    for layer in range(SHAPE.layers):
        wanted = written.gates.weights(layer).detach()
        assert torch.allclose(read.gates.weights(layer), wanted, rtol=1e-3, atol=1e-4)
    assert bool((read.gates.gain == 1).all()), "the gain is within the routes"
    assert not any(parameter.requires_grad for parameter in read.gates.parameters())


def test_thresholds_near_1_are_kept_exactly(tmp_path: Path) -> None:
    gates = made(shape=SHAPE)
    with torch.no_grad():
        gates.thresholds.fill_(0.99987)
    artifact(gates).save_pretrained(tmp_path)
    assert torch.equal(GatesArtifact.from_pretrained(tmp_path).gates.thresholds, gates.thresholds)


def test_a_file_a_folder_and_nothing(folder: Path, tmp_path: Path) -> None:
    assert locate(folder) == locate(folder / FILE) == str(folder / FILE)
    assert locate("owner/name") == "owner/name"
    for nothing in (tmp_path / "absent", "a/b/c", "absent.safetensors"):
        with pytest.raises(ArtifactError, match="there are no gates at"):
            GatesArtifact.from_pretrained(nothing)


def test_a_default_models_gates_are_small(tmp_path: Path) -> None:
    gates = Gates(GateShape(30, 9, 64), generator=torch.Generator())
    path = artifact(gates).save_pretrained(tmp_path)
    assert path.stat().st_size < 1.3e6


@pytest.mark.parametrize("length", [0, 7, 500, -1])
def test_truncated_files_are_refused(folder: Path, length: int) -> None:
    path = folder / FILE
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ArtifactError, match="is damaged or does not hold kvfold's gates") as found:
        GatesArtifact.from_pretrained(path)
    assert "\n" not in str(found.value)


def test_a_changed_byte_is_found(folder: Path) -> None:
    path = folder / FILE
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="its checksum does not match"):
        GatesArtifact.from_pretrained(path)


@pytest.mark.parametrize(
    ("header", "tensors", "message"),
    [
        ({"format": 9}, {}, "gates of format 9, this version reads 1"),
        ({"method": "distill"}, {}, "is for method distill, not sekv"),
        ({}, {"route": torch.full((3, 4, 16, 16), torch.nan)}, "weights that are not numbers"),
        ({}, {"route": torch.zeros(3, 4, 16, 8)}, "does not hold the weights and origin"),
        ({}, {"other": torch.zeros(1)}, "does not hold the weights and origin"),
        ({"shape": {"layers": 2}}, {}, "does not hold the weights and origin"),
        ({"shape": None}, {}, "does not hold the weights and origin"),
        ({"facts": 3}, {}, "does not hold the weights and origin"),
    ],
)
def test_other_files_are_refused(folder: Path, header: dict, tensors: dict, message: str) -> None:
    rewrite(folder / FILE, header=header, tensors=tensors)
    with pytest.raises(ArtifactError, match=message) as found:
        GatesArtifact.from_pretrained(folder)
    assert "\n" not in str(found.value)


def test_weights_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    gates = made(shape=SHAPE)
    with torch.no_grad():
        gates.thresholds[0, 0] = torch.nan
    with pytest.raises(ArtifactError, match="weights that are not numbers"):
        artifact(gates).save_pretrained(tmp_path)
    assert not (tmp_path / FILE).exists()


def test_another_models_shapes_are_refused(folder: Path) -> None:
    read = GatesArtifact.from_pretrained(folder)
    read.check(attached())
    with pytest.raises(ArtifactError, match="trained on tiny, and this model differs"):
        read.check(attached("qwen3"))


def test_only_the_very_model_gets_the_shipped_gates(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates_artifact, "SHIPPED", tmp_path / "absent" / FILE)
    assert shipped_gates(attached()) is None
    monkeypatch.setattr(gates_artifact, "SHIPPED", folder / FILE)
    found = shipped_gates(attached())
    assert found is not None
    assert found.gates.shape == SHAPE
    assert shipped_gates(attached("mistral")) is None
    shutil.copy(__file__, folder / FILE)
    with pytest.raises(ArtifactError, match="is damaged"):
        shipped_gates(attached())


def test_the_shipped_gates_are_small_and_of_the_default_model() -> None:
    """Trained by a command that the documentation names."""
    assert SHIPPED.stat().st_size < 3_000_000
    shipped = GatesArtifact.from_pretrained(SHIPPED)
    assert shipped.trained_on == DEFAULT_NAME
    assert shipped.gates.shape == GateShape(layers=30, query_heads=9, head_dim=64)
    page = Path(__file__).parents[2] / "docs" / "sekv.md"
    assert f"`{shipped.record['command']}`" in page.read_text(encoding="utf-8")
    assert "dirty" not in shipped.record["environment"]["commit"]


@pytest.mark.real
def test_the_default_model_gets_them(
    default_model: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    assert shipped_gates(default_model[0]) is not None
