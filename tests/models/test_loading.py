"""Loading by folder or name: what works, and what is refused with which words."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvfold.errors import (
    ArtifactError,
    ConfigError,
    KVFoldError,
    TransferError,
    UnsupportedModelError,
)
from kvfold.models import (
    anatomy_of,
    hub,
    load_config,
    load_model,
    loading,
    parse_device,
    parse_dtype,
    skeleton,
)
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer that has no pad token."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", pad_token_id=None).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_a_folder_is_loaded_ready_for_batches(saved: Path) -> None:
    model, tokenizer = load_model(saved, device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "</s>")
    assert model.generation_config.pad_token_id == 2
    expected = tiny_model("llama", pad_token_id=None).to(torch.bfloat16).state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected[name].float(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bf16", torch.bfloat16), ("fp16", torch.float16), ("auto", torch.bfloat16)],
)
def test_dtype(saved: Path, dtype: str, expected: torch.dtype) -> None:
    assert load_model(str(saved), dtype=dtype, device="cpu")[0].dtype == expected


def test_dtypes_are_parsed() -> None:
    assert parse_dtype("float32") == parse_dtype("FP32") == parse_dtype(torch.float32)
    assert parse_dtype("auto") is parse_dtype(None) is None
    for wrong in ("int8", "half", torch.int8):
        with pytest.raises(ConfigError, match=r"is not one of float32 \(fp32\)"):
            parse_dtype(wrong)


def test_devices_are_parsed() -> None:
    assert parse_device("cpu") == torch.device("cpu")
    for wrong in ("cuda:99", "toaster", "meta"):
        with pytest.raises(ConfigError, match=f"'{wrong}' is not on this machine, which has: cpu"):
            parse_device(wrong)


def test_a_skeleton_has_the_shapes_without_weights(saved: Path) -> None:
    model = skeleton(saved)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert anatomy_of(model) == anatomy_of(load_model(saved, dtype="auto", device="cpu")[0])
    assert load_config(saved).hidden_size == 64


def refused(name: str | Path, error: type[KVFoldError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        load_model(name, device="cpu")
    assert "\n" not in str(caught.value)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    refused(tmp_path, ConfigError, r"has no config\.json")
    refused(tmp_path / "absent", ConfigError, "there is no folder")
    refused("./absent", ConfigError, "there is no folder")
    refused(str(tmp_path / "file"), ConfigError, "is a file")


def test_a_name_that_nobody_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise ConfigError(f"no model is called {name!r}")

    monkeypatch.setattr(loading, "hub_commit", unknown)
    refused("nobody/nothing", ConfigError, "no model is called 'nobody/nothing'")


def test_without_network_an_unknown_name_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused("nobody/nothing", ConfigError, "HF_HUB_OFFLINE.*Connect to a network, or give a model")


def test_a_hub_that_fails_or_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def model_info(self, repository: str, timeout: float) -> None:
            raise ConnectionError("no route\nto host")

    class Hanging:
        def model_info(self, repository: str, timeout: float) -> None:
            hung.wait(30)

    hung = hub.threading.Event()
    monkeypatch.setattr(hub, "_SECONDS", 0.1)
    for api, message in ((Failing, r"reached \(no route\)"), (Hanging, "did not answer")):
        monkeypatch.setattr(hub, "HfApi", api)
        with pytest.raises(TransferError, match=message):
            hub.hub_commit("a/b")
    hung.set()


def test_damaged_configurations_are_refused(damaged: Path) -> None:
    config = json.loads((damaged / "config.json").read_text())
    (damaged / "config.json").write_text(json.dumps({**config, "model_type": "toaster"}))
    refused(damaged, UnsupportedModelError, "toaster")
    (damaged / "config.json").write_text("{")
    refused(damaged, ConfigError, "cannot be loaded")


def test_a_model_that_is_not_causal_is_refused(damaged: Path) -> None:
    (damaged / "config.json").write_text(json.dumps({"model_type": "clip"}))
    refused(damaged, UnsupportedModelError, "not a causal language model")
    with pytest.raises(UnsupportedModelError, match="not a causal language model"):
        skeleton(damaged)


def test_absent_weights_are_refused(damaged: Path) -> None:
    (damaged / "model.safetensors").unlink()
    refused(damaged, ConfigError, "no weights in safetensors")


def test_pickled_weights_are_refused(damaged: Path) -> None:
    weights = load_file(damaged / "model.safetensors")
    (damaged / "model.safetensors").unlink()
    torch.save(weights, damaged / "pytorch_model.bin")
    refused(damaged, ConfigError, "no weights in safetensors")


def test_truncated_weights_are_refused(damaged: Path) -> None:
    whole = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(damaged, ArtifactError, "are damaged")


def rewrite(folder: Path, name: str, weight: torch.Tensor | None) -> None:
    """Replaces one tensor of a saved model, or drops it."""
    weights = load_file(folder / "model.safetensors")
    weights.pop(name)
    if weight is not None:
        weights[name] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


NAME = "model.layers.1.self_attn.k_proj.weight"


def test_a_missing_tensor_is_named(damaged: Path) -> None:
    rewrite(damaged, NAME, None)
    refused(damaged, ArtifactError, f"lack 1 tensors, such as {NAME}")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(damaged: Path, value: float) -> None:
    weight = torch.zeros(32, 64)
    weight[3, 5] = value
    rewrite(damaged, NAME, weight)
    refused(damaged, ArtifactError, f"1 values of {NAME} are NaN or infinite")


def test_a_tensor_of_another_shape_is_refused(damaged: Path) -> None:
    rewrite(damaged, NAME, torch.zeros(16, 64))
    refused(damaged, ArtifactError, r"do not fit its config\.json")
