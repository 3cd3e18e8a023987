"""The default model hands a prefix to itself, and goes on as it would have."""

import pydoc_data.topics

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvfold
from kvfold.cache import CACHE_KEYWORD, KVCache, prefill
from kvfold.ops.divergence import kl_divergence
from kvfold.transfer import CalibrationSettings, calibrate
from kvfold.transfer.assemble import Assembly
from kvfold.transfer.endpoint import Endpoint
from kvfold.transfer.pour import queries_wanted

LENGTH = 96


@torch.no_grad()
def _logits(model: PreTrainedModel, held: KVCache, follow: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(LENGTH, LENGTH + follow.shape[1])[None]
    return model(follow, position_ids=positions, **{CACHE_KEYWORD: held}).logits


@pytest.mark.real
def test_eight_bits_of_the_default_model_are_enough(
    default_model: tuple[PreTrainedModel, PreTrainedTokenizerBase],
):
    model, tokenizer = default_model
    prose = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    ids = torch.tensor(tokenizer(prose[:12000])["input_ids"])
    texts = list(ids[: 10 * LENGTH].split(LENGTH))
    settings = CalibrationSettings(
        probes=1, continuation=32, patches=0, widths=(8,), sample_rows=500, tokens=256
    )
    codec = calibrate(model, model, texts[:8], settings=settings)
    assert codec.share(256) < 0.53
    prefix, follow = texts[8][None], texts[9][None, :24]
    own = kvfold.make_cache(model, "full")
    prefill(model, prefix, own)
    cache = codec.decode(model, codec.encode(model, prefix), ids=prefix)
    expected, found = (_logits(model, held, follow) for held in (own, cache))
    assert float(kl_divergence(expected, found).mean()) < 0.01
    assert float((expected.argmax(-1) == found.argmax(-1)).float().mean()) > 0.9


@pytest.mark.real
@pytest.mark.parametrize("method", ["snapkv", "distill", "h2o", "tova"])
def test_states_handed_over_fill_a_smaller_cache_as_a_prompt_does(
    default_model: tuple[PreTrainedModel, PreTrainedTokenizerBase], method: str
):
    """Whole heads included, which `distill` has on this model."""
    model, tokenizer = default_model
    ids = torch.tensor([tokenizer(pydoc_data.topics.topics["assert"])["input_ids"][:300]])
    own, into = (kvfold.make_cache(model, method, budget=0.25) for _ in range(2))
    prefill(model, ids, own)
    endpoint = Endpoint(model)
    trace = endpoint.read(ids)
    assembly = Assembly(endpoint, [ids.shape[1]], into)
    assembly.read(ids, queries_wanted(into), lambda layer: (trace.keys(layer), trace.values(layer)))
    assembly.finish()
    assert into.report().bytes_fast == own.report().bytes_fast
    same = [
        float((mine.slots.positions == theirs.slots.positions).float().mean())
        for mine, theirs in zip(into.parts, own.parts, strict=True)
    ]
    # Scores of two tokens may be so near that rounding decides.
    assert sum(same) / len(same) > 0.98
