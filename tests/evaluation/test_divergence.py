"""Distances to the full cache, against the same computed the long way."""

from __future__ import annotations

import pytest
import torch

import kvfold
from kvfold.cache import prefill
from kvfold.evaluation.divergence import divergence, forced_logits
from tests.tiny import tiny_ids, tiny_model

PROMPT, FORCED = 60, 9


def test_forced_logits_equal_one_forward() -> None:
    model, ids = tiny_model(), tiny_ids(1, PROMPT + FORCED)
    with torch.no_grad():
        expected = model(ids).logits[0, PROMPT:]
        kvfold.attach(model)
        cache = kvfold.make_cache(model, "full")
        prefill(model, ids[:, :PROMPT], cache)
        found = torch.stack(list(forced_logits(model, cache, ids[0, PROMPT:].tolist())))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_divergence_is_the_mean_over_tokens() -> None:
    model, ids = tiny_model(), tiny_ids(1, PROMPT + FORCED)
    tokens = ids[0, PROMPT:].tolist()
    kvfold.attach(model)
    caches = [kvfold.make_cache(model, "full"), kvfold.make_cache(model, "streaming", budget=16)]
    for cache in caches:
        prefill(model, ids[:, :PROMPT], cache)
    full, small = (list(forced_logits(model, cache.fork(), tokens)) for cache in caches)
    found = divergence(model, caches[1], tokens, full, seed=0)
    p, q = (torch.stack(side).double().softmax(-1) for side in (full, small))
    distances = (p * (p / q).log()).sum(-1)
    assert found is not None
    assert found.kl.count == FORCED
    assert found.kl.mean == pytest.approx(float(distances.mean()), rel=1e-4)
    assert found.kl.low < found.kl.mean < found.kl.high
    agreement = (p.argmax(-1) == q.argmax(-1)).double().mean()
    assert found.agreement == pytest.approx(float(agreement))
    assert caches[1].get_seq_length() == PROMPT


def test_no_tokens_no_distance() -> None:
    model = tiny_model()
    kvfold.attach(model)
    assert divergence(model, kvfold.make_cache(model, "full"), [], [], seed=0) is None
