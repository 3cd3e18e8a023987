"""One measurement in this process: the caches are what they should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kvfold import api
from kvfold.bench.measure import perform
from kvfold.bench.request import Measurement, Request
from kvfold.bench.subjects import held_by, prepare, stored_cache
from kvfold.cache import CACHE_KEYWORD
from kvfold.errors import ConfigError
from kvfold.models import load_model
from kvfold.text import text_tokens

Saved = Callable[[str], str]

TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
"""Of a tiny model: layers, keys and values, kv heads, head dim, fp32."""


def request(model: str, subject: str, budget: str | None = None, **change: object) -> Request:
    start = Request(
        task="store",
        model=model,
        dtype="float32",
        device="cpu",
        threads=1,
        subject=subject,
        budget=budget,
        context=100,
    )
    return replace(start, **change)


def store_and_decode(model: str, subject: str, budget: str | None, folder: Path) -> Measurement:
    file = str(folder / "cache.safetensors")
    method = "full" if subject == "dynamic" else subject
    assert perform(request(model, method, budget, file=file)) is None
    decode = request(model, subject, budget, file=file, task="decode", batch=3, warmup=2, steps=5)
    measurement = perform(decode)
    assert measurement is not None
    return measurement


@pytest.mark.parametrize("subject", ["full", "streaming", "sekv"])
def test_a_text_longer_than_the_model_can_read(saved: Saved, subject: str, tmp_path: Path) -> None:
    file, budget = str(tmp_path / "cache.safetensors"), None if subject == "full" else "0.5"
    long = request(saved("llama"), subject, budget, file=file, context=3000, read=200)
    assert perform(long) is None
    found = perform(replace(long, task="decode", steps=3))
    assert found is not None
    assert found.tokens_seen == 3003
    assert found.full_bytes == 3003 * TOKEN_BYTES
    has_tiers = subject == "sekv"
    assert (0 < found.slow_bytes < found.cache_bytes) == has_tiers
    assert (found.moved_bytes > 0) == has_tiers


def test_layers_that_are_not_ours_cannot_repeat(saved: Saved, tmp_path: Path) -> None:
    file = str(tmp_path / "cache.safetensors")
    long = request(saved("gemma3"), "full", file=file, context=3000, read=200)
    with pytest.raises(ConfigError, match="leave --read out"):
        perform(long)


@pytest.mark.parametrize("subject", ["dynamic", "full"])
def test_full_caches_hold_everything(saved: Saved, subject: str, tmp_path: Path) -> None:
    found = store_and_decode(saved("llama"), subject, None, tmp_path)
    assert len(found.seconds) == 5
    assert min(found.seconds) > 0
    assert found.tokens == 15
    assert found.tokens_per_second == pytest.approx(15 / sum(found.seconds))
    assert (found.tokens_seen, found.tokens_kept) == (107, [107, 107, 107])
    assert found.full_bytes == 3 * 107 * TOKEN_BYTES
    assert found.cache_bytes >= found.full_bytes
    assert found.attention == ("kvfold" if subject == "full" else "sdpa")


@pytest.mark.parametrize("subject", ["streaming", "snapkv", "h2o"])
def test_methods_hold_their_budget(saved: Saved, subject: str, tmp_path: Path) -> None:
    found = store_and_decode(saved("llama"), subject, "0.25", tmp_path)
    assert found.tokens_seen == 107
    assert 24 <= max(found.tokens_kept) <= 26
    held = 3 * max(found.tokens_kept) * TOKEN_BYTES
    assert held <= found.cache_bytes < 1.2 * held
    assert found.full_bytes == 3 * 107 * TOKEN_BYTES


@pytest.mark.parametrize("kind", ["llama", "mistral_window", "gemma3"])
def test_dynamic_is_transformers_own_cache(saved: Saved, kind: str, tmp_path: Path) -> None:
    """Filled from a stored full cache, it answers as if it had been prefilled itself."""
    path = tmp_path / "cache.safetensors"
    perform(request(saved(kind), "full", file=str(path)))
    model, tokenizer = load_model(saved(kind), device="cpu")
    prepare(model, "dynamic")
    ids = torch.tensor([text_tokens(tokenizer, 104)])
    cache, expected = stored_cache(model, "dynamic", path), DynamicCache(config=model.config)
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in expected.layers]
    with torch.no_grad():
        model(ids[:, :100], **{CACHE_KEYWORD: expected})
        cache.batch_repeat_interleave(2)
        for token in ids[:, 100:].split(1, dim=1):
            truth = model(token, **{CACHE_KEYWORD: expected}).logits
            logits = model(token.expand(2, -1), **{CACHE_KEYWORD: cache}).logits
            torch.testing.assert_close(logits, truth.expand(2, -1, -1), rtol=1e-4, atol=1e-4)
    assert held_by(cache).cache_bytes == 2 * held_by(expected).cache_bytes


def test_prefill_is_timed_to_the_first_token(saved: Saved) -> None:
    found = perform(request(saved("llama"), "snapkv", "0.25", task="prefill", chunk_size=32))
    assert found is not None
    assert len(found.seconds) == 1
    assert (found.tokens, found.tokens_seen, found.tokens_kept) == (100, 100, [25, 25, 25])
    if found.rss_model is not None and found.rss_peak is not None:
        assert found.rss_peak >= found.rss_model > found.model_bytes
    model, _ = api.load(saved("llama"), device="cpu")
    assert found.model_bytes == 4 * model.num_parameters()


def test_what_folding_takes_is_part_of_a_prefill(saved: Saved) -> None:
    found = perform(request(saved("llama"), "sekv", "0.5", task="prefill", chunk_size=40))
    assert found is not None
    assert set(found.parts) == {"surprisal", "segmentation", "spans"}
    assert all(took > 0 for took in found.parts.values())
    assert sum(found.parts.values()) < sum(found.seconds)


def test_dynamic_prefills_in_chunks_too(saved: Saved) -> None:
    found = perform(request(saved("llama"), "dynamic", task="prefill", chunk_size=32))
    assert found is not None
    assert (found.attention, found.tokens_kept) == ("sdpa", [100, 100, 100])
    assert found.cache_bytes == found.full_bytes == 100 * TOKEN_BYTES


def test_dynamic_has_no_file(saved: Saved, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="store method full"):
        perform(request(saved("llama"), "dynamic", file=str(tmp_path / "cache")))


def test_a_stored_cache_needs_a_file(saved: Saved) -> None:
    with pytest.raises(ConfigError, match="task decode needs the file"):
        perform(request(saved("llama"), "full", task="decode", steps=1))
