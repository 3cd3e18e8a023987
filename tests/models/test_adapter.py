"""Adapters: a base model and small changes load as one plain model, and nothing else is taken."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from kvfold.errors import ArtifactError
from kvfold.models import fingerprint, load_config, load_model, shape_facts
from kvfold.models.adapter import FILE, SHIPPED, AdapterArtifact, find_adapter
from tests.tiny_folder import save_tiny

LAYER = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base") / "tiny")


def adapter(base: str, *, layer: str = LAYER, value: float = 0.5) -> AdapterArtifact:
    model, _ = load_model(base)
    generator = torch.Generator().manual_seed(1)
    down = torch.randn(2, 64, generator=generator).half()
    up = torch.full((64, 2), value).half()
    facts, seal = shape_facts(model), fingerprint(model)
    return AdapterArtifact({layer: (down, up)}, 2.0, base, facts, seal, {"seed": 1})


def test_a_folder_with_an_adapter_loads_as_a_plain_model(base: str, tmp_path: Path) -> None:
    made = adapter(base)
    assert made.save_pretrained(tmp_path / "special") == tmp_path / "special" / FILE
    model, tokenizer = load_model(tmp_path / "special")
    plain, other = load_model(base)
    assert tokenizer.get_vocab() == other.get_vocab()
    assert model.state_dict().keys() == plain.state_dict().keys()
    down, up = made.changes[LAYER]
    for name, weight in model.named_parameters():
        expected = plain.get_parameter(name)
        if name == f"{LAYER}.weight":
            expected = (expected.double() + 2.0 * up.double() @ down.double()).float()
        torch.testing.assert_close(weight, expected, rtol=0, atol=0)
    assert load_config(tmp_path / "special").hidden_size == 64
    assert fingerprint(model) != fingerprint(plain)


def test_the_dtype_is_that_of_the_merged_weights(base: str, tmp_path: Path) -> None:
    adapter(base).save_pretrained(tmp_path)
    full, _ = load_model(tmp_path)
    half, _ = load_model(tmp_path, dtype="bfloat16")
    weights = [model.get_parameter(f"{LAYER}.weight") for model in (full, half)]
    assert weights[1].dtype == torch.bfloat16
    torch.testing.assert_close(weights[0].bfloat16(), weights[1], rtol=0, atol=0)


def test_what_was_written_is_read(base: str, tmp_path: Path) -> None:
    made = adapter(base)
    found = AdapterArtifact.from_pretrained(made.save_pretrained(tmp_path))
    assert (found.scale, found.base, found.record) == (2.0, base, {"seed": 1})
    for one, other in zip(found.changes[LAYER], made.changes[LAYER], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_truncated_file_is_refused(base: str, tmp_path: Path) -> None:
    path = adapter(base).save_pretrained(tmp_path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ArtifactError, match="damaged or not an adapter of kvfold"):
        load_model(tmp_path)


def test_numbers_that_are_none_are_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not numbers"):
        adapter(base, value=float("nan")).save_pretrained(tmp_path)
    assert not (tmp_path / FILE).exists()


def test_a_model_of_other_shapes_is_refused(base: str, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(ArtifactError, match=r"this model differs \(layers 2 instead of 3"):
        adapter(base).merge(load_model(other)[0])


def test_a_layer_that_is_not_there_is_refused(base: str) -> None:
    with pytest.raises(ArtifactError, match="layers that tiny does not have"):
        adapter(base, layer="model.layers.9.self_attn.q_proj").merge(load_model(base)[0])


def test_other_weights_are_taken_with_a_warning(
    base: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = load_model(base)
    with torch.no_grad():
        model.get_parameter(f"{LAYER}.weight").mul_(2)
    with caplog.at_level(logging.WARNING):
        adapter(base).merge(model)
    assert "trained on other weights of tiny" in caplog.text


def test_names_that_are_no_adapter(base: str) -> None:
    assert find_adapter("default") is None
    assert find_adapter(base) is None
    assert find_adapter("") is None
    assert find_adapter("specialist") == SHIPPED["specialist"]
