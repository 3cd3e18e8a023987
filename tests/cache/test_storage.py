"""A cache on disk continues as if it had never been away; a damaged file is refused."""

import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import kvfold
from kvfold.cache import KVCache
from kvfold.errors import ArtifactError, ConfigError
from tests.contract import BASIC, EVICTING, attached, held_positions, left_padded, teacher_forced
from tests.tiny import tiny_ids, tiny_model

CASES = [("full", "layer"), *EVICTING]


@pytest.mark.parametrize(("method", "scope"), CASES)
def test_a_loaded_cache_goes_on_identically(method: str, scope: str, tmp_path: Path):
    model, follow = attached(), tiny_ids(2, 12, seed=1)
    budget = None if method == "full" else 0.4
    held = kvfold.make_cache(model, method, budget=budget, scope=scope)
    mask = left_padded([50, 31], 50)
    teacher_forced(model, held, tiny_ids(2, 50), follow[:, :0], mask=mask)
    held.save(tmp_path / "cache.safetensors")
    loaded = kvfold.load_cache(tmp_path / "cache.safetensors", model)
    assert held_positions(loaded) == held_positions(held)
    longer = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    one, two = (
        teacher_forced(model, each, follow[:, :1], follow[:, 1:], mask=longer)
        for each in (held, loaded)
    )
    assert torch.equal(one, two)
    assert loaded.report().tokens_kept == held.report().tokens_kept
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]


@pytest.mark.parametrize("kind", ["gemma3", "mistral_window", "phi3"])
def test_other_families(kind: str, tmp_path: Path):
    model, follow = attached(kind), tiny_ids(1, 12, seed=1)
    held = kvfold.make_cache(model, "snapkv", budget=20)
    teacher_forced(model, held, tiny_ids(1, 50), follow[:, :3])
    held.save(tmp_path / "cache.safetensors")
    loaded = kvfold.load_cache(tmp_path / "cache.safetensors", model)
    one, two = (
        teacher_forced(model, each, follow[:, 3:4], follow[:, 4:]) for each in (held, loaded)
    )
    assert torch.equal(one, two)


@pytest.mark.parametrize("budget", ["40KiB", 0.123456789, 0.1, "33%", 24], ids=str)
def test_every_kind_of_budget_comes_back(budget: str | float, tmp_path: Path):
    model = attached()
    held = kvfold.make_cache(model, "tova", budget=budget, sinks=2, recent=5)
    kvfold.prefill(model, tiny_ids(1, 60), held)
    held.save(tmp_path / "cache.safetensors")
    loaded = kvfold.load_cache(tmp_path / "cache.safetensors", model)
    assert loaded.spec.budget == held.spec.budget
    assert loaded.own_layers[0].eviction == held.own_layers[0].eviction


def test_an_empty_cache_comes_back(tmp_path: Path):
    held = kvfold.make_cache(attached(), "h2o", budget=16)
    held.save(tmp_path / "cache.safetensors")
    loaded = kvfold.load_cache(tmp_path / "cache.safetensors", attached())
    assert loaded.get_seq_length() == 0
    kvfold.prefill(attached(), tiny_ids(1, 30), loaded)
    assert loaded.report().tokens_kept == [16, 16, 16]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    held = kvfold.make_cache(attached(), "h2o", budget=16)
    kvfold.prefill(attached(), tiny_ids(2, 30), held, attention_mask=left_padded([30, 20], 30))
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    held.save(path)
    return path


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.05, 0.2, 0.5, 0.9, 0.999, 0.99999])
def test_a_truncated_file_is_refused(saved: Path, tmp_path: Path, share: float):
    content = saved.read_bytes()
    (tmp_path / "cut").write_bytes(content[: int(share * len(content))])
    with pytest.raises(ArtifactError, match="damaged"):
        kvfold.load_cache(tmp_path / "cut", attached())


def test_a_flipped_bit_in_the_header_is_refused(saved: Path, tmp_path: Path):
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    places = range(0, header, max(1, header // 150))
    for place in places:
        for bit in (0, 2, 6):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            (tmp_path / "flipped").write_bytes(flipped)
            with pytest.raises(ArtifactError):
                kvfold.load_cache(tmp_path / "flipped", attached())


def test_a_flipped_bit_in_the_data_is_refused(saved: Path, tmp_path: Path):
    content = saved.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for place in range(header, len(content), (len(content) - header) // 20):
        flipped = bytearray(content)
        flipped[place] ^= 4
        (tmp_path / "flipped").write_bytes(flipped)
        with pytest.raises(ArtifactError):
            kvfold.load_cache(tmp_path / "flipped", attached())


def test_another_model_is_refused(saved: Path):
    other = tiny_model(seed=1)
    kvfold.attach(other)
    with pytest.raises(ArtifactError, match="another model"):
        kvfold.load_cache(saved, other)
    with pytest.raises(ArtifactError, match="another model"):
        kvfold.load_cache(saved, attached("qwen3"))


def test_what_is_no_cache_is_refused(tmp_path: Path):
    with pytest.raises(ArtifactError, match="there is no file"):
        kvfold.load_cache(tmp_path / "absent", attached())
    with pytest.raises(ArtifactError, match="is a folder: give the file"):
        kvfold.load_cache(tmp_path, attached())
    safetensors.torch.save_file({"keys": torch.zeros(3)}, tmp_path / "other")
    with pytest.raises(ArtifactError, match="not a kvfold cache"):
        kvfold.load_cache(tmp_path / "other", attached())
    safetensors.torch.save_file({"keys": torch.zeros(3)}, tmp_path / "list", {"kvfold": "[1]"})
    with pytest.raises(ArtifactError):
        kvfold.load_cache(tmp_path / "list", attached())


def _some_cache() -> KVCache:
    held = kvfold.make_cache(attached(), "streaming", budget=16)
    kvfold.prefill(attached(), tiny_ids(1, 30), held)
    return held


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    held = _some_cache()
    with pytest.raises(ArtifactError, match="cannot write"):
        held.save(tmp_path / "absent" / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot write"):
        held.save(tmp_path / "file" / "cache")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArtifactError, match="cannot write"):
        held.save(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    path = tmp_path / "cache"
    held = _some_cache()
    held.save(path)
    before = path.read_bytes()

    def fails(tensors: object, name: str, **options: object) -> None:
        Path(name).write_bytes(b"half")
        raise error

    monkeypatch.setattr("kvfold.tensorfile.save_file", fails)
    with pytest.raises((ArtifactError, KeyboardInterrupt)):
        held.save(path)
    assert [item.name for item in tmp_path.iterdir()] == ["cache"]
    assert path.read_bytes() == before


def test_saving_again_replaces_the_file(tmp_path: Path):
    held = _some_cache()
    held.save(tmp_path / "cache")
    shutil.copy(tmp_path / "cache", tmp_path / "first")
    kvfold.prefill(attached(), tiny_ids(1, 5), held)
    held.save(tmp_path / "cache")
    lengths = [
        kvfold.load_cache(tmp_path / name, attached()).get_seq_length()
        for name in ("first", "cache")
    ]
    assert lengths == [30, 35]


def test_a_cache_whose_model_is_gone_cannot_be_saved(tmp_path: Path):
    model = tiny_model()
    kvfold.attach(model)
    held = kvfold.make_cache(model, BASIC[0][0])
    del model
    with pytest.raises(ArtifactError, match="model no longer exists"):
        held.save(tmp_path / "cache")


def test_another_dtype_is_refused(saved: Path):
    model = tiny_model()
    model.to(torch.bfloat16)
    with (
        kvfold.attach(model),
        pytest.raises(ArtifactError, match=r"written in torch.float32, but the model runs in"),
    ):
        kvfold.load_cache(saved, model)


def test_a_model_that_is_not_attached_is_told_so(saved: Path):
    with pytest.raises(ConfigError, match=r"kvfold\.attach"):
        kvfold.load_cache(saved, tiny_model())
