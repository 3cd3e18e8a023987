"""The prefill bench: the memory check and the cost of statistics."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvfold.bench import PrefillSettings, bench_prefill
from kvfold.bench.prefill import MemoryCheck
from tests.bench.fakes import FakeRunner, silent

MEBIBYTE = 2**20


@pytest.fixture
def settings(saved: Callable[[str], str]) -> PrefillSettings:
    return PrefillSettings(
        model=saved("llama"),
        subjects=("full", "streaming", "snapkv", "knorm", "h2o"),
        contexts=(64,),
        chunk_size=16,
        rounds=2,
        threads=1,
    )


def test_every_subject_is_asked_with_the_chunk_size(
    settings: PrefillSettings, runner: FakeRunner
) -> None:
    result = bench_prefill(settings, progress=silent, runner=runner)
    assert [each.subject for each in runner.requests] == list(settings.subjects) * 2
    assert {(each.task, each.chunk_size, each.context) for each in runner.requests} == {
        ("prefill", 16, 64)
    }
    (comparison,) = result.comparisons
    for number, outcome in enumerate(comparison.outcomes):
        assert outcome.seconds.samples == (0.75 + 0.25 * number, 2.0 + 0.25 * number)


def test_memory_is_checked_for_what_has_a_budget(
    settings: PrefillSettings, runner: FakeRunner
) -> None:
    findings = bench_prefill(settings, progress=silent, runner=runner).to_dict()["findings"]
    memory = [each for each in findings if each["kind"] == "memory"]
    assert [each["subject"] for each in memory] == ["streaming", "snapkv", "knorm", "h2o"]
    first = memory[0]
    assert first["chunk_bytes"] == 16 * 3 * 2 * 2 * 16 * 4  # tokens, layers, k and v, heads, dim
    assert first["budget_bytes"] == 160
    assert first["rss_peak"] == 2007  # of the second round
    assert first["bound"] == 1.15 * (2000 + 160 + first["chunk_bytes"])
    assert first["holds"] is True


def test_a_peak_above_the_bound_is_told() -> None:
    sizes = {
        "rss_model": 100 * MEBIBYTE,
        "budget_bytes": 20 * MEBIBYTE,
        "chunk_bytes": 10 * MEBIBYTE,
    }
    fits = MemoryCheck(subject="h2o", context=64, rss_peak=149 * MEBIBYTE, **sizes)
    above = MemoryCheck(subject="h2o", context=64, rss_peak=151 * MEBIBYTE, **sizes)
    assert (fits.holds, above.holds) == (True, False)
    assert str(above) == (
        "h2o, context 64: peak 151 MiB is ABOVE 150 MiB = 1.15 x (process with model 100 + "
        "budget 20 + one chunk 10)"
    )


def test_statistics_are_compared_with_a_method_without(
    settings: PrefillSettings, runner: FakeRunner
) -> None:
    findings = bench_prefill(settings, progress=silent, runner=runner).to_dict()["findings"]
    costs = [each for each in findings if each["kind"] == "statistics"]
    assert [(each["subject"], each["over"]) for each in costs] == [
        ("snapkv", "streaming"),
        ("h2o", "streaming"),
    ]
    assert costs[0]["extra"]["samples"] == pytest.approx([1.25 / 1.0 - 1, 2.5 / 2.25 - 1])
    assert costs[0]["text"] == (
        "snapkv, context 64: attention statistics cost +18.1% (+11.1% to +25.0%) time to the "
        "first token, against streaming"
    )
