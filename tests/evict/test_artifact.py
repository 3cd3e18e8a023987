"""Trained policies as files: what is written is read back, and nothing else is taken."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import kvfold
from kvfold.errors import ArtifactError
from kvfold.evict.artifact import FILE, SHIPPED, PolicyArtifact
from kvfold.evict.network import PolicyNetwork
from kvfold.models import shape_facts
from tests.contract import attached
from tests.tiny import tiny_ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    network = PolicyNetwork(generator=torch.Generator().manual_seed(0))
    facts = shape_facts(attached())
    PolicyArtifact(network, "tiny", facts, {"steps": 3}).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, *, header: dict | None = None, weights: dict | None = None) -> None:
    """Change parts of the header, or some weights, of a policy's file."""
    path = folder / FILE
    with safe_open(str(path), framework="pt") as file:
        told = json.loads(file.metadata()["kvfold"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    told |= header or {}
    save_file(tensors | (weights or {}), path, metadata={"kvfold": json.dumps(told)})


def test_what_is_written_is_read_back(folder: Path):
    read = PolicyArtifact.from_pretrained(folder)
    assert (read.trained_on, read.record) == ("tiny", {"steps": 3})
    assert read.facts == shape_facts(attached())
    features, held = torch.rand(2, 7, 5), torch.tensor([7, 7])
    network = PolicyNetwork(generator=torch.Generator().manual_seed(0))
    assert torch.equal(read.network(features, held), network(features, held))
    assert PolicyArtifact.from_pretrained(folder / FILE).trained_on == "tiny"
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_a_truncated_file_is_refused(folder: Path):
    whole = (folder / FILE).read_bytes()
    for length in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        (folder / FILE).write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match="damaged or not a kvfold policy"):
            PolicyArtifact.from_pretrained(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": 2}, "policy format 2, this version reads 1"),
        ({"method": "sekv"}, "for method sekv, not distill"),
        ({"features": ["mass", "norm"]}, r"features \['mass', 'norm'\]"),
        ({"facts": None}, "does not hold"),
    ],
)
def test_another_kind_of_file_is_refused(folder: Path, header: dict, message: str):
    rewrite(folder, header=header)
    with pytest.raises(ArtifactError, match=message):
        PolicyArtifact.from_pretrained(folder)


def test_weights_of_other_shapes_or_no_numbers_are_refused(folder: Path):
    rewrite(folder, weights={"layers.0.weight": torch.zeros(128, 6)})
    with pytest.raises(ArtifactError, match="does not hold the weights"):
        PolicyArtifact.from_pretrained(folder)
    rewrite(folder, weights={"layers.0.weight": torch.full((128, 5), torch.nan)})
    with pytest.raises(ArtifactError, match="not numbers"):
        PolicyArtifact.from_pretrained(folder)


def test_a_name_of_nothing_is_refused(tmp_path: Path):
    for name in (tmp_path, tmp_path / "none", "none.safetensors", ""):
        with pytest.raises(ArtifactError, match="there is no policy at"):
            PolicyArtifact.from_pretrained(name)


def test_a_policy_of_another_model_is_used_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    model = attached("qwen3")
    cache = kvfold.make_cache(model, "distill", budget=20, policy=str(folder))
    assert "was trained on tiny and this model has other" in caplog.text
    kvfold.prefill(model, tiny_ids(1, 60), cache)
    assert cache.report().tokens_kept == [20] * len(cache.own_layers)
    caplog.clear()
    kvfold.make_cache(attached(), "distill", budget=20, policy=str(folder))
    assert caplog.text == ""


def test_the_shipped_policy_is_small_and_of_the_default_model():
    assert SHIPPED.stat().st_size < 2**20
    shipped = PolicyArtifact.from_pretrained(SHIPPED)
    assert shipped.trained_on == "default"
    assert shipped.record["command"].startswith("kvfold train distill")
    assert shipped.facts["layers"] == 30


def test_a_saved_cache_keeps_its_policy(folder: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    cache = kvfold.make_cache(attached(), "distill", budget=20, policy=str(elsewhere))
    kvfold.prefill(attached(), tiny_ids(1, 60), cache)
    cache.save(tmp_path / "cache.safetensors")
    read = kvfold.load_cache(tmp_path / "cache.safetensors", attached())
    assert read.spec.options["policy"] == str(elsewhere)
