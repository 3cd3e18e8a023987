"""Evaluations by several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvfold
from kvfold.errors import ConfigError, KVFoldError
from kvfold.evaluation.fidelity import Part, evaluate, evaluate_part
from kvfold.evaluation.fidelity_rows import FILE
from kvfold.evaluation.fidelity_settings import FidelitySettings, MethodSpec
from kvfold.evaluation.fidelity_workers import Source, evaluate_parts
from kvfold.models import load_model
from tests.evaluation.test_fidelity import assert_alike
from tests.tiny_folder import save_tiny

SETTINGS = FidelitySettings(
    methods=(MethodSpec("streaming", "streaming"),),
    budgets=("0.25",),
    sets=("arithmetic", "prose"),
    samples=3,
    lengths=(300,),
    tokens=3,
    max_new_tokens=3,
    batch=2,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def test_parts_are_all_and_each_is_done_once(model: str, tmp_path: Path) -> None:
    loaded, tokenizer = load_model(model)
    kvfold.attach(loaded)
    counts, stages = [], []
    for index in range(3):
        evaluate_part(
            loaded,
            tokenizer,
            SETTINGS,
            folder=tmp_path,
            part=Part(index, 3),
            on_progress=lambda stage, _: stages.append(stage),
        )
        counts.append(len((tmp_path / FILE).read_text(encoding="utf-8").splitlines()))
    # Four batches of 2, 1, 2 and 1 samples, with two methods; the first process has the last, too.
    assert counts == [6, 8, 12]
    assert len(stages) == len(set(stages)) == 8


def test_processes_find_what_one_finds(model: str, tmp_path: Path) -> None:
    told: list[float] = []
    evaluate_parts(
        Source(model),
        SETTINGS,
        folder=tmp_path / "two",
        workers=2,
        on_progress=lambda _, share: told.append(share),
    )
    loaded, tokenizer = load_model(model)
    kvfold.attach(loaded)
    missing: list[str] = []
    together = evaluate(
        loaded,
        tokenizer,
        SETTINGS,
        folder=tmp_path / "two",
        resume=True,
        on_progress=lambda stage, _: missing.append(stage),
    )
    assert missing == []
    assert told[-1] == 1
    assert_alike(together.rows, evaluate(loaded, tokenizer, SETTINGS, folder=tmp_path / "one").rows)


def test_what_a_process_cannot_do_is_told(tmp_path: Path) -> None:
    with pytest.raises(KVFoldError, match="nowhere"):
        evaluate_parts(Source(str(tmp_path / "nowhere")), SETTINGS, folder=tmp_path, workers=2)
    with pytest.raises(ConfigError, match="workers: 0 is below 1"):
        evaluate_parts(Source("default"), SETTINGS, folder=tmp_path, workers=0)


def test_processes_take_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [Part(index, 3) for index in range(3)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [Source("a").device_of(part) for part in parts] == ["cuda:0", "cuda:1", "cuda:0"]
    assert Source("a", device="cpu").device_of(parts[1]) == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert Source("a", device="cuda").device_of(parts[1]) == "cuda"
