"""The scripts for a GPU, run on a tiny model without one."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "bench" / "gpu"


def test_diffusion_caches_take_turns(tmp_path: Path) -> None:
    given = "--model tiny --device cpu --dtype float32 --prompt 8 --length 4 --rounds 2 --out"
    command = [sys.executable, str(SCRIPTS / "diffusion.py"), *given.split(), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "diffusion.json").read_text())
    assert result["shape"]["layers"] == 4
    caches = result["caches"]
    assert {name.partition(",")[0] for name in caches} >= {"none", "spa", "dllm", "dual", "dkv"}
    assert all(len(found["tokens_per_second"]["samples"]) == 2 for found in caches.values())
    assert caches["none"]["bytes_held"] == 0 < caches["spa"]["bytes_held"]
    first = result["ratios"][0]
    assert (first["subject"], first["over"]) == ("spa", "none")


SMALL = "--dtype float32 --prefill-contexts 64 --read 48 --chunk-size 32 --steps 3 --rounds 2"
DECODE = f"--model tiny --device cpu --contexts 96 160 --warmup 1 --budget 0.5 {SMALL}".split()
METHODS = ["full", "streaming", "snapkv", "distill", "sekv"]


@pytest.fixture
def decode() -> ModuleType:
    """The script, in this process."""
    spec = importlib.util.spec_from_file_location("gpu_decode", SCRIPTS / "decode.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def result_of(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str
) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["decode.py", *DECODE, "--out", str(folder), *more])
    script.main()
    return json.loads((folder / "gpu-decode.json").read_text())


def test_methods_decode_and_read_in_turns(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "decode.py"), *DECODE, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    turns = [line.partition(", round ")[0] for line in done.stderr.splitlines() if "round" in line]
    assert turns[:10] == [f"tiny, decode, context 96: {method}" for method in METHODS] * 2
    result = json.loads((tmp_path / "gpu-decode.json").read_text())
    assert result["seed"] == 0
    assert "decode.py --model tiny" in result["command"]
    assert {"commit", "torch", "cuda", "device"} <= set(result["environment"])
    found = result["models"]["tiny"]
    assert [each["context"] for each in found["decode"]] == [96, 160]
    for each in (*found["decode"], *found["prefill"]):
        assert each["failed"] == {}
        rows = {row["subject"]: row for row in each["outcomes"]}
        assert list(rows) == METHODS
        assert all(len(row["tokens_per_second"]["samples"]) == 2 for row in rows.values())
        assert all(
            row["measurements"][0]["tokens_seen"] == each["context"] for row in rows.values()
        )
        full = rows["full"]
        assert full["cache_bytes"] > full["full_bytes"] == each["context"] * 3 * 2 * 2 * 32 * 4
        assert rows["streaming"]["cache_bytes"] < 0.7 * full["cache_bytes"]
        assert len(each["ratios"]) == 10
    assert len(found["findings"]) == 8


def test_what_runs_out_of_memory_is_a_row(
    decode: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill, tried = decode.fill, list[str]()

    def narrow(model: Any, cache: Any, prompt: torch.Tensor, count: int) -> None:
        if cache.spec.method == "full" and count > 100:
            tried.append("full")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.\nMore.")
        fill(model, cache, prompt, count)

    monkeypatch.setattr(decode, "fill", narrow)
    result = result_of(decode, monkeypatch, tmp_path, "--methods", "full", "streaming")
    short, long = result["models"]["tiny"]["decode"]
    assert short["failed"] == {}
    assert long["failed"] == {"full": "out of memory: CUDA out of memory. Tried to allocate much."}
    assert [row["subject"] for row in long["outcomes"]] == ["streaming"]
    assert tried == ["full"]

    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(decode, "fill", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        result_of(decode, monkeypatch, tmp_path)


def test_what_has_not_begun_in_time_is_left_out(
    decode: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ["--methods", "full", "streaming", "--minutes", "1", "--contexts", "96"]
    clock = iter([0.0, 0.0, 1.0, 2.0, 99.0])
    monkeypatch.setattr(decode, "time", SimpleNamespace(monotonic=lambda: next(clock, 99.0)))
    found = result_of(decode, monkeypatch, tmp_path, *given)["models"]["tiny"]
    [row] = found["decode"]
    assert [len(each["measurements"]) for each in row["outcomes"]] == [1, 1]
    [row] = found["prefill"]
    assert row["outcomes"] == []
    assert row["failed"] == dict.fromkeys(["full", "streaming"], "not measured: time was up")
