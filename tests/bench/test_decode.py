"""The decode bench around its processes: what is asked for, in which order, what is concluded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.bench import DecodeSettings, Outcome, bench_decode
from kvfold.bench.comparison import Comparison
from kvfold.bench.decode import payoffs
from kvfold.bench.request import Measurement, Request
from kvfold.errors import KVFoldError
from tests.bench.fakes import FakeRunner, silent

Saved = Callable[[str], str]


@pytest.fixture
def settings(saved: Saved) -> DecodeSettings:
    return DecodeSettings(
        model=saved("llama"),
        subjects=("dynamic", "full", "snapkv"),
        contexts=(64, 128),
        batches=(1, 2),
        warmup=2,
        steps=3,
        rounds=2,
        threads=1,
    )


def test_each_context_is_stored_once_and_every_round_takes_turns(
    settings: DecodeSettings, runner: FakeRunner
) -> None:
    bench_decode(settings, progress=silent, runner=runner)
    asked = [(each.task, each.context, each.batch, each.subject) for each in runner.requests]
    turns = ["dynamic", "full", "snapkv"] * 2
    assert asked == [
        step
        for context in (59, 123)
        for step in [
            ("store", context, 1, "full"),
            ("store", context, 1, "snapkv"),
            *(("decode", context, batch, subject) for batch in (1, 2) for subject in turns),
        ]
    ]
    assert {each.budget for each in runner.requests if each.subject == "snapkv"} == {"0.25"}
    assert {each.budget for each in runner.requests if each.subject != "snapkv"} == {None}


def test_a_long_context_repeats_what_was_read(settings: DecodeSettings, runner: FakeRunner) -> None:
    settings = replace(settings, contexts=(64, 5000), read=100)
    result = bench_decode(settings, progress=silent, runner=runner)
    asked = {(each.context, each.read) for each in runner.requests}
    assert asked == {(59, 59), (4995, 100)}
    assert "beyond 100 tokens a context repeats" in " ".join(result.notes)
    assert "--read 100" in settings.command("decode")


def test_dynamic_reads_what_full_stored(settings: DecodeSettings, runner: FakeRunner) -> None:
    bench_decode(settings, progress=silent, runner=runner)
    first = runner.requests[:5]
    assert [Path(str(each.file)).name for each in first] == [
        "full.safetensors",
        "snapkv.safetensors",
        "full.safetensors",
        "full.safetensors",
        "snapkv.safetensors",
    ]


def test_the_result_agrees_with_its_samples(settings: DecodeSettings, runner: FakeRunner) -> None:
    result = bench_decode(settings, progress=silent, runner=runner).to_dict()
    assert [(each["context"], each["batch"]) for each in result["comparisons"]] == [
        (64, 1),
        (64, 2),
        (128, 1),
        (128, 2),
    ]
    for comparison in result["comparisons"]:
        speeds = {each["subject"]: each["tokens_per_second"] for each in comparison["outcomes"]}
        for outcome in comparison["outcomes"]:
            raw = outcome["measurements"]
            assert len(raw) == 2
            assert outcome["tokens_per_second"]["samples"] == [
                comparison["batch"] * 3 / sum(each["seconds"]) for each in raw
            ]
            assert outcome["cache_bytes"] == raw[-1]["cache_bytes"]
            assert outcome["rss_peak"] == max(each["rss_peak"] for each in raw)
        assert len(comparison["ratios"]) == 3
        for ratio in comparison["ratios"]:
            above, below = speeds[ratio["subject"]], speeds[ratio["over"]]
            pairs = zip(above["samples"], below["samples"], strict=True)
            assert ratio["samples"] == [a / b for a, b in pairs]
            assert ratio["min"] <= ratio["median"] <= ratio["max"]
    assert result["settings"]["rounds"] == 2
    assert "rows of a batch repeat one prefilled row" in " ".join(result["notes"])
    assert result["environment"]["torch"]


def test_half_precision_on_a_cpu_is_judged_by_full(
    settings: DecodeSettings, runner: FakeRunner
) -> None:
    half = bench_decode(replace(settings, dtype="bfloat16"), progress=silent, runner=runner)
    assert any("ratio over full, not over dynamic" in note for note in half.notes)
    whole = bench_decode(settings, progress=silent, runner=runner)
    assert not any("ratio over full" in note for note in whole.notes)


def outcome(subject: str, *seconds: float) -> Outcome:
    made = FakeRunner()(
        Request(
            task="decode",
            model="",
            dtype="float32",
            device="cpu",
            threads=1,
            subject=subject,
            context=8,
            steps=1,
        )
    )
    assert isinstance(made, Measurement)
    return Outcome(subject, tuple(replace(made, seconds=[each]) for each in seconds))


def test_where_methods_pay_is_said() -> None:
    outcomes = (
        outcome("snapkv", 1.0, 2.0),
        outcome("dynamic", 9.0, 9.0),
        outcome("full", 2.0, 3.0),
        outcome("h2o", 4.0, 4.0),
        outcome("tova", 1.0, 6.0),
    )
    texts = [str(each) for each in payoffs([Comparison(512, 8, outcomes)])]
    assert texts == [
        "snapkv pays at context 512, batch 8: 1.75 times full",
        "h2o does not pay at context 512, batch 8: slower, 0.62 times full",
        "tova does not pay at context 512, batch 8: no clear difference, 1.25 times full",
    ]
    assert payoffs([Comparison(512, 8, outcomes[:2])]) == []


def test_stored_caches_are_removed_when_a_process_fails(settings: DecodeSettings) -> None:
    files: list[Path] = []

    def fail(request: Request) -> None:
        files.append(Path(str(request.file)))
        files[-1].write_text("stored")
        if request.subject == "snapkv":
            raise KVFoldError("the process failed")

    with pytest.raises(KVFoldError, match="the process failed"):
        bench_decode(settings, progress=silent, runner=fail)
    assert [file.name for file in files] == ["full.safetensors", "snapkv.safetensors"]
    assert not any(file.parent.exists() for file in files)
