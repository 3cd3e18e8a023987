"""Trained policies as files: what is written is read back, and nothing else is taken."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import kvfold
from kvfold.cache import KVCache
from kvfold.errors import ArtifactError, ConfigError
from kvfold.evict.artifact import FILE, SHIPPED, PolicyArtifact
from kvfold.evict.network import PolicyNetwork
from kvfold.models import DEFAULT_NAME, shape_facts
from kvfold.tensorfile import write_sealed
from tests.contract import attached, held_positions, teacher_forced
from tests.tiny import tiny_ids

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    network = PolicyNetwork(generator=torch.Generator().manual_seed(0))
    facts = shape_facts(attached())
    importance = torch.tensor([[0.3, 0.0], [0.1, 0.2], [0.0, 0.0]])
    PolicyArtifact(network, importance, "tiny", facts, {"steps": 3}).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, *, header: dict | None = None, weights: dict | None = None) -> None:
    """Change parts of the header, or some weights, of a policy's file."""
    path = folder / FILE
    with safe_open(str(path), framework="pt") as file:
        told = json.loads(file.metadata()["kvfold"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    told |= header or {}
    write_sealed(path, told, tensors | (weights or {}))


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


def test_a_changed_byte_is_found(folder: Path):
    content = bytearray((folder / FILE).read_bytes())
    content[-3] ^= 1
    (folder / FILE).write_bytes(content)
    with pytest.raises(ArtifactError, match="its checksum does not match"):
        PolicyArtifact.from_pretrained(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": 1}, "policy format 1, this version reads 3"),
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
    for name, shape in (("layers.0.weight", (128, 5)), ("importance", (3, 2))):
        rewrite(folder, weights={name: torch.full(shape, torch.nan)})
        with pytest.raises(ArtifactError, match="not numbers"):
            PolicyArtifact.from_pretrained(folder)


@pytest.mark.parametrize("wrong", [torch.zeros(2), torch.zeros(2, 2, dtype=torch.long)])
def test_an_importance_that_is_none_is_refused(folder: Path, wrong: torch.Tensor):
    rewrite(folder, weights={"importance": wrong})
    with pytest.raises(ArtifactError, match="its importance"):
        PolicyArtifact.from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "value"), [("scale", 0.0), ("scale", -1.0), ("used", -1.0), ("used", 0.5)]
)
def test_a_normalisation_that_no_training_gives_is_refused(folder: Path, name: str, value: float):
    rewrite(folder, weights={name: torch.tensor([1.0, 1.0, value, 1.0, 1.0])})
    with pytest.raises(ArtifactError, match="scales its features"):
        PolicyArtifact.from_pretrained(folder)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the Hub is asked for; it has nothing. The current folder is an empty one."""
    names: list[str] = []

    def download(name: str, file: str) -> str:
        names.append(name)
        raise OSError(f"no {file}")

    monkeypatch.setattr("kvfold.models.hub.hf_hub_download", download)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return names


def test_what_is_here_or_can_only_be_here_is_not_looked_up_on_the_hub(asked: list[str]):
    Path("runs/first").mkdir(parents=True)
    Path("runs/first/checkpoint.safetensors").touch()
    Path("runs/second").symlink_to("nowhere")
    for name in (
        *("", ".", "none", "none.safetensors", "runs", "runs/first", "runs/first/", "./first"),
        *("../first", "~/first", "/first", "a/b/c", "runs/", "runs/second"),
        *("runs/none.safetensors", Path("runs/first"), Path("owner/name")),
    ):
        with pytest.raises(ArtifactError, match="there is no policy at"):
            PolicyArtifact.from_pretrained(name)
    assert asked == []


def test_a_name_of_nothing_here_is_looked_up_on_the_hub(asked: list[str]):
    for name in ("owner/name", "owner-1/policy_v1.5"):
        with pytest.raises(ArtifactError, match=f"nothing at {name}, and the Hub gave no"):
            kvfold.make_cache(attached(), "distill", policy=name)
    assert asked == ["owner/name", "owner-1/policy_v1.5"]


@pytest.mark.parametrize(
    "wrong", [{"policy": 3}, {"policy": None}, {"policy": b"x"}, {"digest": 3}]
)
def test_a_policy_that_is_no_name_is_refused(wrong: dict):
    with pytest.raises(ConfigError, match=f"distill: {next(iter(wrong))} is .*, give the"):
        kvfold.make_cache(attached(), "distill", **wrong)


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
    assert shipped.trained_on == DEFAULT_NAME
    assert shipped.facts["layers"] == 30
    assert f"`{shipped.record['command']}`" in README.read_text(encoding="utf-8")
    assert "dirty" not in shipped.record["environment"]["commit"]


def decoded(policy: str | Path) -> KVCache:
    """A cache in the midst of the turns of one scoring."""
    cache = kvfold.make_cache(attached(), "distill", budget=20, every=8, policy=policy)
    teacher_forced(attached(), cache, tiny_ids(1, 60), tiny_ids(1, 11, seed=1))
    return cache


@pytest.mark.parametrize("again", ["save", "fork"])
def test_a_cache_goes_on_as_it_would_have(folder: Path, tmp_path: Path, again: str):
    cache, first, more = decoded(folder), tiny_ids(1, 1, seed=2), tiny_ids(1, 20, seed=3)
    if again == "save":
        cache.save(tmp_path / "cache.safetensors")
        other = kvfold.load_cache(tmp_path / "cache.safetensors", attached())
    else:
        other = cache.fork()
    before = held_positions(cache)
    assert held_positions(other) == before
    expected = teacher_forced(attached(), cache, first, more)
    assert torch.equal(teacher_forced(attached(), other, first, more), expected)
    assert held_positions(other) == held_positions(cache) != before


def test_a_saved_cache_finds_its_policy_from_any_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    shutil.copytree(folder, folder / "named")
    monkeypatch.chdir(folder)
    file = str(folder / "named" / FILE)
    for name in ("named", Path("named"), "./named/", f"named/{FILE}", folder / "named"):
        monkeypatch.chdir(folder)
        decoded(name).save(folder / "cache.safetensors")
        monkeypatch.chdir("/")
        read = kvfold.load_cache(folder / "cache.safetensors", attached())
        assert read.spec.options["policy"] == file
    assert caplog.text == ""


def test_a_saved_cache_is_not_continued_by_other_weights_in_silence(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    decoded(folder).save(folder / "cache.safetensors")
    artifact = PolicyArtifact.from_pretrained(folder)
    network = PolicyNetwork(generator=torch.Generator().manual_seed(1))
    replace(artifact, network=network).save_pretrained(folder)
    assert caplog.text == ""
    kvfold.load_cache(folder / "cache.safetensors", attached())
    assert f"the weights at {folder / FILE} are others than those" in caplog.text
