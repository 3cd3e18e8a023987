"""What holds whether lm-eval is installed or not: it is imported, and asked for, only when used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvfold.errors import ConfigError
from kvfold.evaluation import harness, harness_diffusion
from tests.processes import environment

HINT = "lm-eval is not installed: run `make harness`"


def test_without_lm_eval_the_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "_HF", object)
    monkeypatch.setattr(harness_diffusion, "_TEMPLATE", object)
    with pytest.raises(ConfigError, match=HINT):
        harness.KVFoldLM()
    with pytest.raises(ConfigError, match=HINT):
        harness_diffusion.KVFoldDiffusionLM()
    with pytest.raises(ConfigError, match=HINT):
        harness.register()


def test_importing_kvfold_imports_no_lm_eval() -> None:
    rooms = "kvfold.api, kvfold.evaluation, kvfold.cli.lm_eval"
    code = f"import sys, {rooms}; print('lm_eval' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )
    assert result.stdout.strip() == "False", result.stderr[-3000:]
