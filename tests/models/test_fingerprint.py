"""A fingerprint tells models apart, and nothing else."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvfold.errors import ConfigError
from kvfold.models import differing_facts, fingerprint, fingerprint_facts
from tests.tiny import SUPPORTED, tiny_config, tiny_ids, tiny_model


def test_the_same_model_has_the_same_fingerprint() -> None:
    assert fingerprint(tiny_model("llama")) == fingerprint(tiny_model("llama"))
    assert len(fingerprint(tiny_model("llama"))) == 64


@pytest.mark.parametrize("kind", SUPPORTED)
def test_storage_and_dtype_do_not_matter(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    before = fingerprint(model)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)) == before
    model.generate(tiny_ids(1, 5), max_new_tokens=2)
    assert fingerprint(model) == before


def test_families_and_seeds_differ() -> None:
    found = {fingerprint(tiny_model(kind)) for kind in SUPPORTED}
    assert len(found) == len(SUPPORTED)
    assert fingerprint(tiny_model("llama", seed=1)) not in found


def fine_tuned(steps: int) -> PreTrainedModel:
    model = tiny_model("llama", gain=1.0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        ids = tiny_ids(2, 16, seed=step)
        model(ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model


def test_a_fine_tuned_model_differs_and_the_difference_is_said() -> None:
    plain, tuned = fingerprint_facts(fine_tuned(0)), fingerprint_facts(fine_tuned(1))
    assert plain != tuned
    assert "fine-tuned" in differing_facts(plain, tuned)
    assert differing_facts(plain, plain) == ""


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "down_proj"])
def test_a_change_of_any_projection_is_seen(name: str) -> None:
    model = tiny_model("llama")
    before = fingerprint(model)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if f"layers.2.{'mlp' if name == 'down_proj' else 'self_attn'}.{name}" in path:
                weight.mul_(1.02)
    assert fingerprint(model) != before


def test_a_difference_in_shape_is_named() -> None:
    expected = fingerprint_facts(tiny_model("llama"))
    found = fingerprint_facts(tiny_model("llama", num_key_value_heads=4))
    assert differing_facts(expected, found) == "kv_heads 4 instead of 2"


def test_a_sentence_names_some_differences_and_no_long_ones():
    numbers = {f"size_{number}": number for number in range(6)}
    said = differing_facts(numbers | {"a": list(range(60))}, dict.fromkeys(numbers, 9) | {"a": []})
    assert said == (
        "other a, size_0 9 instead of 0, size_1 9 instead of 1, size_2 9 instead of 2, and 3 more"
    )


def test_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    with pytest.raises(ConfigError, match="no weights"):
        fingerprint(model)
