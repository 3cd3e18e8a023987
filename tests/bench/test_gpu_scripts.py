"""The scripts for a GPU, run on a tiny model without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
