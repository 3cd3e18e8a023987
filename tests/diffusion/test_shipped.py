"""The diffusion models that come with the package do what their records say."""

from __future__ import annotations

import json

import pytest

from kvfold.diffusion import DiffusionModel, LLaDASampler, SpaCache
from kvfold.diffusion.arithmetic import LENGTH, Exam
from kvfold.diffusion.own import OWN, SHIPPED

NAMES = sorted(folder.name for folder in SHIPPED.iterdir())
MOST_BYTES = 3_000_000


def test_models_of_additions_are_shipped() -> None:
    assert [name for name in OWN if name.startswith("arithmetic")] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_small_and_says_how_it_was_made(name: str) -> None:
    assert sum(file.stat().st_size for file in (SHIPPED / name).iterdir()) < MOST_BYTES
    record = json.loads((SHIPPED / name / "training.json").read_text(encoding="utf-8"))
    assert record["command"].startswith("kvfold diffuse train-arithmetic")
    assert record["problems"] >= 500
    assert [point["step"] for point in record["curve"]][-1] == record["steps"]


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_adds_as_its_record_says(name: str) -> None:
    model, exam = DiffusionModel.from_pretrained(SHIPPED / name), Exam.draw(200)
    record = json.loads((SHIPPED / name / "training.json").read_text(encoding="utf-8"))
    right = exam.take(model, "none", LLaDASampler(steps=LENGTH))
    assert right == pytest.approx(record["right_by_steps"][str(LENGTH)], abs=0.02)
    cached = exam.take(model, SpaCache(ratio=0.25), LLaDASampler(steps=LENGTH))
    assert cached == pytest.approx(right, abs=0.02)
