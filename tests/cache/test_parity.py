"""A full kvfold cache says what transformers' own cache says, in every supported family."""

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import kvfold
from kvfold.cache import CACHE_KEYWORD
from tests.contract import assert_close, attached, left_padded, teacher_forced
from tests.tiny import SUPPORTED, tiny_ids, tiny_model

TOKENS = 40
TOLERANCE = 2e-4


def generate(
    model: PreTrainedModel, ids: torch.Tensor, held: object, mask: torch.Tensor | None, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens `[B, N]` and logits `[B, N, V]`."""
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **{CACHE_KEYWORD: held},
        **options,
    )
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits, dim=1)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_full_equals_the_models_own_cache(kind: str, padded: bool):
    ids, mask = tiny_ids(2, 60), left_padded([60, 43], 60) if padded else None
    own = tiny_model(kind)
    tokens, logits = generate(own, ids, DynamicCache(config=own.config), mask)
    model = attached(kind)
    actual, close = generate(model, ids, kvfold.make_cache(model, "full"), mask)
    assert torch.equal(actual, tokens)
    assert_close(close, logits, TOLERANCE)
    # The same prompt in chunks, the same tokens given.
    held = kvfold.make_cache(model, "full")
    chunked = teacher_forced(model, held, ids, tokens[:, :-1], mask=mask, chunk_size=17)
    assert_close(chunked, logits, TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3", "mistral_window"])
def test_an_attached_model_with_its_own_cache(kind: str):
    ids, mask = tiny_ids(2, 40), left_padded([40, 22], 40)
    own, model = tiny_model(kind), attached(kind)
    tokens, logits = generate(own, ids, DynamicCache(config=own.config), mask)
    actual, close = generate(model, ids, DynamicCache(config=model.config), mask)
    assert torch.equal(actual, tokens)
    assert_close(close, logits, TOLERANCE)


def test_without_a_cache():
    ids, mask = tiny_ids(2, 40), left_padded([40, 22], 40)
    with torch.no_grad():
        expected = tiny_model()(ids, attention_mask=mask, use_cache=False).logits
        actual = attached()(ids, attention_mask=mask, use_cache=False).logits
    assert_close(actual[:, 18:], expected[:, 18:], TOLERANCE)


def test_generate_in_chunks():
    model, ids = attached(), tiny_ids(2, 60)
    plain, _ = generate(model, ids, kvfold.make_cache(model, "full"), None)
    chunked, _ = generate(model, ids, kvfold.make_cache(model, "full"), None, prefill_chunk_size=16)
    assert torch.equal(chunked, plain)


@pytest.mark.parametrize("kind", [kind for kind in SUPPORTED if kind != "mistral_window"])
def test_every_family_evicts(kind: str):
    model = attached(kind)
    held = kvfold.make_cache(model, "h2o", budget=24)
    _, logits = generate(model, tiny_ids(2, 60), held, left_padded([60, 43], 60))
    assert torch.isfinite(logits).all()
    assert held.own_layers
    assert all(int(layer.slots.counts.max()) == 24 for layer in held.own_layers)
    assert held.get_seq_length() == 99


def test_a_model_of_windows_alone_has_nothing_to_evict(caplog: pytest.LogCaptureFixture):
    model = attached("mistral_window")
    held = kvfold.make_cache(model, "h2o", budget=24)
    assert "nothing to evict" in caplog.text
    assert held.own_layers == []
    tokens, _ = generate(model, tiny_ids(2, 60), held, None)
    expected, _ = generate(model, tiny_ids(2, 60), DynamicCache(config=model.config), None)
    assert torch.equal(tokens, expected)
    assert held.report().tokens_kept == [23, 23, 23]
