"""The default model in our decoder computes what it computes in transformers, seen both ways."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.diffusion import CACHES, DiffusionModel, LLaDASampler, generate
from kvfold.models import ensure_default
from tests.contract import assert_close

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def model() -> DiffusionModel:
    return DiffusionModel.from_pretrained(
        "default", device="cpu", mask_token_id=16, prediction="shifted"
    )


def test_logits_equal_those_of_transformers_with_a_full_mask(model: DiffusionModel) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(ensure_default(), dtype=torch.float32)
    ids = torch.arange(1000, 1024)[None]
    everything = torch.ones(1, 1, 24, 24, dtype=torch.bool)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=everything).logits
    # Huge activations of single tokens magnify the rounding of float32.
    assert_close(model.logits(ids)[:, 1:], expected[:, :-1], tolerance=5e-4)


def test_every_cache_writes_with_it(model: DiffusionModel) -> None:
    sampler = LLaDASampler(block_length=3, steps=4, stop_at_eos=False)
    for name in CACHES:
        found = generate(model, [[504, 253], [1005]], name, length=6, sampler=sampler)
        assert found.report.steps == 4
        assert 16 not in found.ids
