"""What is refused before anything starts, and with which words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvfold.bench import DecodeSettings, PrefillSettings, bench_decode, bench_prefill, checks
from kvfold.errors import BudgetError, ConfigError, UnsupportedModelError
from tests.bench.fakes import FakeRunner, silent

Saved = Callable[[str], str]

DECODE = {"contexts": (256,), "batches": (1,), "warmup": 2, "steps": 3}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"contexts": (0,)}, "context is 0"),
        ({"contexts": ()}, "no context is given"),
        ({"contexts": (64, 2049)}, "2049 is longer than the model's 2048 positions"),
        ({"contexts": (9000,), "read": 2049}, "positions: give at most 2048, or --read fewer"),
        ({"read": 0}, "read is 0"),
        ({"contexts": (5,)}, "2 warm-up and 3 timed steps: give more than 5"),
        ({"batches": (2, 0)}, "batch is 0"),
        ({"rounds": 0}, "rounds is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"warmup": 0}, "warmup is 0"),
        ({"threads": -1}, "threads is -1"),
        ({"subjects": ()}, "no method is given"),
        ({"subjects": ("full", "snapvk")}, "'snapvk': choose from dynamic, distill"),
        ({"subjects": ("full", "full")}, "full is given twice"),
        ({"dtype": "int3"}, "dtype 'int3'"),
        ({"device": "abacus"}, "abacus"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"budget": "abc"}, "'abc' is not an amount"),
        ({"budget": "2.5"}, "more than the whole cache"),
        ({"budget": "100B", "batches": (8,)}, "holds 0 tokens of this model and batch"),
        ({"budget": "0", "subjects": ("full",)}, "keeps nothing"),
    ],
)
def test_bad_decode_settings_are_refused(
    saved: Saved, runner: FakeRunner, change: dict[str, object], words: str
) -> None:
    settings = DecodeSettings(**{"model": saved("llama"), **DECODE, **change})
    with pytest.raises(ConfigError) as caught:
        bench_decode(settings, progress=silent, runner=runner)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, BudgetError) == ("budget" in change)
    assert runner.requests == []


def test_bad_chunk_size_is_refused(saved: Saved, runner: FakeRunner) -> None:
    settings = PrefillSettings(model=saved("llama"), contexts=(64,), chunk_size=0)
    with pytest.raises(ConfigError, match="chunk size is 0"):
        bench_prefill(settings, progress=silent, runner=runner)
    assert runner.requests == []


def test_a_model_with_its_own_attention_is_refused(saved: Saved, runner: FakeRunner) -> None:
    settings = DecodeSettings(model=saved("bloom"), **DECODE)
    with pytest.raises(UnsupportedModelError):
        bench_decode(settings, progress=silent, runner=runner)
    assert runner.requests == []


def test_what_does_not_fit_into_memory_is_refused(
    saved: Saved, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DecodeSettings(model=saved("llama"), **{**DECODE, "batches": (1, 64)})
    facts = checks.check(settings, silent)
    needed = facts.weight_bytes + 64 * facts.kv_bytes(256)
    monkeypatch.setattr(checks, "available", lambda: needed)
    checks.check(settings, silent)
    monkeypatch.setattr(checks, "available", lambda: needed - 1)
    with pytest.raises(ConfigError, match="batch 64 at context 256"):
        bench_decode(settings, progress=silent, runner=runner)


def test_sizes_follow_from_model_and_dtype(saved: Saved) -> None:
    model = saved("llama")
    facts = checks.check(DecodeSettings(model=model, dtype="bf16", **DECODE), silent)
    assert facts.dtype == torch.bfloat16
    assert facts.kv_bytes(10) == 10 * 3 * 2 * 2 * 16 * 2  # layers, k and v, heads, dim, bytes
    assert facts.weight_bytes == 2 * facts.anatomy.parameters
