"""Published layouts load into our decoder and compute what they should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvfold.diffusion import DiffusionModel
from kvfold.diffusion import model as model_module
from kvfold.errors import ArtifactError, ConfigError, UnsupportedModelError
from tests.contract import assert_close
from tests.diffusion.checkpoints import (
    DREAM_CONFIG,
    EOS,
    LLADA_CONFIG,
    MASK,
    STYLES,
    dream_tensors,
    llada_tensors,
    prompts_of,
    save,
    tiny_diffusion,
)
from tests.diffusion.reference import dream_logits, llada_logits
from tests.tiny import tiny_model

REFERENCES = {"llada": llada_logits, "dream": dream_logits}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("style", STYLES)
def test_published_names_load_and_equal_a_plain_forward(
    style: str, shards: int, tmp_path: Path
) -> None:
    config, make = STYLES[style]
    folder = save(tmp_path, config, make(), shards=shards)
    model = DiffusionModel.from_pretrained(folder, device="cpu")
    ids = prompts_of(17)[0]
    found = model.logits(torch.tensor([ids]))[0]
    assert_close(found.double(), REFERENCES[style](config, make(), ids))


@pytest.mark.parametrize("style", STYLES)
def test_padding_changes_nothing(style: str) -> None:
    model, (short, long) = tiny_diffusion(style), prompts_of(9, 14)
    ids = torch.tensor([[0] * 5 + short, long])
    valid = torch.tensor([[False] * 5 + [True] * 9, [True] * 14])
    found = model.logits(ids, valid)
    assert torch.isfinite(found).all()
    shift = model.traits.shift  # the first place of a shifted model has a neighbour's logits
    assert_close(found[0, 5 + shift :], model.logits(torch.tensor([short]))[0, shift:])
    assert_close(found[1], model.logits(torch.tensor([long]))[0])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_adapted_models_equal_transformers_with_a_full_mask(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    theirs = tiny_model(kind, tie_word_embeddings=tied)
    for name, weight in theirs.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_(generator=torch.Generator().manual_seed(1))
    theirs.save_pretrained(tmp_path)
    model = DiffusionModel.from_pretrained(
        tmp_path, device="cpu", mask_token_id=3, prediction="same"
    )
    assert (model.shape.tied_head, model.shape.query_key_norm) == (tied, kind == "qwen3")
    ids = torch.tensor(prompts_of(13, 13))
    everything = torch.ones(2, 1, 13, 13, dtype=torch.bool)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=everything).logits
    assert_close(model.logits(ids), expected)


def test_block_causal_sees_its_block_and_those_before(tmp_path: Path) -> None:
    theirs = tiny_model("llama")
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["diffusion"] = {
        "mask_token_id": 3,
        "prediction": "shifted",
        "topology": "block_causal",
        "block_length": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = DiffusionModel.from_pretrained(tmp_path, device="cpu")
    ids = torch.tensor(prompts_of(10))
    block = torch.arange(10) // 4
    with torch.no_grad():
        expected = theirs(ids, attention_mask=(block <= block[:, None])[None, None]).logits
    assert_close(model.logits(ids)[:, 1:], expected[:, :-1])


def test_traits_come_from_the_configuration() -> None:
    llada, dream = tiny_diffusion("llada").traits, tiny_diffusion("dream").traits
    assert (llada.mask_id, llada.prediction, llada.eos_ids) == (MASK, "same", {EOS})
    assert (dream.mask_id, dream.prediction, dream.eos_ids) == (MASK, "shifted", {EOS})
    assert llada.never == [MASK]  # LLaDA's pad ends a text
    assert dream.never == [MASK, 92]
    assert (llada.sampler, dream.sampler) == ("llada", "dream")


def test_dtype_is_followed(tmp_path: Path) -> None:
    save(tmp_path, LLADA_CONFIG, llada_tensors())
    model = DiffusionModel.from_pretrained(tmp_path, dtype="bfloat16", device="cpu")
    assert {weight.dtype for weight in model.decoder.parameters()} == {torch.bfloat16}
    close = model.logits(torch.tensor(prompts_of(8))).float()
    exact = tiny_diffusion("llada").logits(torch.tensor(prompts_of(8)))
    assert_close(close, exact, tolerance=0.1)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model_type": "gpt2"}, ConfigError, "choose one of llada"),
        ({"mask_token_id": None}, ConfigError, "no mask token"),
        ({"mask_token_id": 96}, ConfigError, "from 0 to 95"),
        ({"prediction": "next"}, ConfigError, "'same' or 'shifted'"),
        ({"topology": "ring"}, ConfigError, "'bidirectional' or 'block_causal'"),
        ({"topology": "block_causal"}, ConfigError, "block_length None"),
        ({"layer_norm_type": "default"}, UnsupportedModelError, "layer_norm_type is 'default'"),
        ({"activation_type": "swiglu2"}, UnsupportedModelError, "'swiglu2'"),
        ({"d_model": None}, UnsupportedModelError, "hidden"),
        ({"rope_theta": -1}, UnsupportedModelError, "rope_theta is -1"),
        ({"n_kv_heads": 3}, UnsupportedModelError, "multiple"),
        ({"n_layers": 2}, ArtifactError, "unexpected"),
        ({"n_layers": 4}, ArtifactError, "lack 9 tensors"),
        ({"mlp_hidden_size": 40}, ArtifactError, "config.json makes it"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    save(tmp_path, LLADA_CONFIG | changes, llada_tensors())
    with pytest.raises(error, match=words):
        DiffusionModel.from_pretrained(tmp_path, device="cpu")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        DiffusionModel.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        DiffusionModel.from_pretrained(tmp_path / "none")
    save(tmp_path, DREAM_CONFIG, dream_tensors(), shards=2)
    part = tmp_path / "model-00002-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="damaged"):
        DiffusionModel.from_pretrained(tmp_path, device="cpu")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"index\.json is damaged"):
        DiffusionModel.from_pretrained(tmp_path, device="cpu")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match="no weights in safetensors"):
        DiffusionModel.from_pretrained(tmp_path, device="cpu")


def test_a_name_is_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(model_module, "cached_snapshot", lambda name, files: None)
    with pytest.raises(ConfigError, match="not on this machine yet"):
        DiffusionModel.from_pretrained("someone/a-diffusion-model")
    folder = save(tmp_path, LLADA_CONFIG, llada_tensors())
    monkeypatch.setattr(model_module, "cached_snapshot", lambda name, files: folder)
    found = DiffusionModel.from_pretrained("someone/a-diffusion-model", device="cpu")
    assert (found.source, found.traits.mask_id) == ("someone/a-diffusion-model", MASK)
    monkeypatch.setattr(model_module, "hub_commit", lambda name: "0" * 40)
    asked = []
    monkeypatch.setattr(
        model_module, "snapshot_download", lambda *a, **k: asked.append((a, k)) or str(folder)
    )
    DiffusionModel.from_pretrained("someone/a-diffusion-model", device="cpu")
    (names, options) = asked[0]
    assert (names, options["revision"]) == (("someone/a-diffusion-model",), "0" * 40)
    assert "*.safetensors" in options["allow_patterns"]
    assert not any("py" in pattern for pattern in options["allow_patterns"])


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    tensors = llada_tensors()
    tensors["model.transformer.ln_f.weight"][3] = torch.nan
    save(tmp_path, LLADA_CONFIG, tensors)
    with pytest.raises(ArtifactError, match="NaN or infinite"):
        DiffusionModel.from_pretrained(tmp_path, device="cpu")


@pytest.mark.parametrize("style", STYLES)
def test_a_proxy_of_full_rank_has_the_cosines_of_the_values(style: str) -> None:
    model = tiny_diffusion(style)
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(2, 1, 40, 32, generator=generator)
    for layer, proxy in zip(
        model.decoder.blocks, model.proxies(model.shape.value_width), strict=True
    ):
        values = layer.value(first), layer.value(second)
        expected = torch.nn.functional.cosine_similarity(*values, dim=-1)
        found = torch.nn.functional.cosine_similarity(proxy(first), proxy(second), dim=-1)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_a_rank_above_the_width_of_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="from 1 to 16"):
        tiny_diffusion("dream").proxies(17)
