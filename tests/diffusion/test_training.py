"""Diffusion models are trained on the right objective, go on bit for bit, and load again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvfold.diffusion import OWN, DiffusionModel, load_tokenizer
from kvfold.diffusion.arithmetic import (
    LENGTH,
    PROMPT,
    SHAPE,
    Exam,
    Sums,
    addition,
    arithmetic_model,
    arithmetic_tokenizer,
    is_arithmetic,
)
from kvfold.diffusion.learner import Batch, MaskedLearner, MaskingSettings
from kvfold.diffusion.model import model_folder
from kvfold.diffusion.own import own_home
from kvfold.diffusion.shape import Prediction
from kvfold.diffusion.train import CorpusLessons, adapt, open_adaptable, train_arithmetic
from kvfold.errors import ConfigError
from kvfold.training import TrainingSettings, open_corpus
from kvfold.training.checkpoint import CHECKPOINT
from kvfold.training.words import Split
from tests.tiny_folder import byte_tokenizer, save_tiny

SETTINGS = TrainingSettings(steps=4, learning_rate=1e-3, validate_every=2, checkpoint_every=2)
MASKING = MaskingSettings(rows=4, validation=6)


class Fixed:
    """One batch, the same every time."""

    def __init__(self, ids: torch.Tensor, free: torch.Tensor) -> None:
        self._batch = ids, free

    def batch(self, index: int, rows: int, split: Split) -> Batch:
        return self._batch

    def describe(self) -> Mapping[str, object]:
        return {}


@pytest.mark.parametrize("prediction", ["same", "shifted"])
def test_the_loss_is_the_weighted_likelihood_of_what_is_masked(prediction: Prediction) -> None:
    model = arithmetic_model(prediction)
    ids, free = Sums().batch(0, 3, "train")
    free = free.clone()
    free[1, 0] = True  # nothing predicts it under a shifted prediction
    learner = MaskedLearner(model, Fixed(ids, free), MaskingSettings(rows=3, least=0.1))
    found = learner.step(0, torch.Generator().manual_seed(5))

    generator = torch.Generator().manual_seed(5)
    offset = float(torch.rand(1, generator=generator))
    drawn = torch.rand(ids.shape, generator=generator)
    total, count, nlls = 0.0, 0, list[float]()
    for row in range(3):
        time = 0.1 + 0.9 * ((offset + row / 3) % 1)
        places = [p for p in range(ids.shape[1]) if free[row, p] and (p or prediction == "same")]
        masked = [p for p in places if drawn[row, p] < time]
        seen = ids[row].clone()
        seen[masked] = model.traits.mask_id
        logs = model.logits(seen[None])[0].log_softmax(dim=-1)
        each = [-logs[place, ids[row, place]].item() for place in masked]
        total, count, nlls = total + sum(each) / time, count + len(places), nlls + each
    assert found.loss.item() == pytest.approx(total / count, rel=1e-4)
    assert found.metrics["nll"] == pytest.approx(sum(nlls) / len(nlls), rel=1e-4)


def test_a_step_without_masks_moves_nothing() -> None:
    model = arithmetic_model("same")
    ids, free = Sums().batch(0, 2, "train")
    learner = MaskedLearner(model, Fixed(ids, torch.zeros_like(free)), MaskingSettings(rows=2))
    found = learner.step(0, torch.Generator())
    found.loss.backward()
    assert found.loss.item() == 0
    gradients = [p.grad for p in model.decoder.parameters() if p.grad is not None]
    assert all(not gradient.any() for gradient in gradients)


def test_additions_are_right_and_none_that_is_held_out_is_learnt() -> None:
    letters = arithmetic_tokenizer()
    row = addition(123, 9)
    assert letters.decode(row) == "123+009=0132;321900" + "<end>" * 5
    assert letters("123+009=")["input_ids"] == row[:PROMPT]
    assert letters.decode(letters("1a")["input_ids"]) == "1<unknown>"
    sums = Sums(3)
    learnt = {tuple(row) for row in sums.batch(0, 3000, "train")[0].tolist()}
    held = {tuple(row) for row in sums.batch(0, 3000, "validation")[0].tolist()}
    assert len(learnt) > 2900
    assert len(held) > 2900
    assert not learnt & held
    ends = [len({row[place] for row in held}) for place in (0, 1, 2, 4, 5, 6)]
    assert ends == [10] * 6, "no digit is held out"
    assert torch.equal(sums.batch(7, 2, "train")[0], Sums(3).batch(7, 2, "train")[0])
    assert not torch.equal(sums.batch(7, 2, "train")[0], Sums(4).batch(7, 2, "train")[0])
    assert sums.batch(0, 2, "train")[1].sum(dim=1).tolist() == [LENGTH, LENGTH]


def test_an_exam_marks_answers() -> None:
    exam = Exam.draw(4)
    assert exam.right(exam.answers) == 1
    wrong = [[*exam.answers[0][:-1]], *exam.answers[1:]]
    assert exam.right(wrong) == 0.75
    assert 0 <= exam.take(arithmetic_model("same"), "none") <= 1


def test_a_trained_model_loads_and_a_broken_off_run_ends_the_same(tmp_path: Path) -> None:
    whole = train_arithmetic(tmp_path / "whole", SETTINGS, MASKING, problems=3)

    class StopError(Exception):
        pass

    def stop(at: object) -> None:
        if getattr(at, "step", 0) == 3:
            raise StopError

    with pytest.raises(StopError):
        train_arithmetic(tmp_path / "run", SETTINGS, MASKING, problems=3, on_progress=stop)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    run = train_arithmetic(tmp_path / "run", SETTINGS, MASKING, problems=3, resume=True)
    assert run.record["curve"] == whole.record["curve"]
    held = run.model.decoder.state_dict()
    for name, tensor in whole.model.decoder.state_dict().items():
        assert torch.equal(tensor, held[name]), name

    loaded = DiffusionModel.from_pretrained(whole.folder, device="cpu")
    assert loaded.traits == whole.model.traits
    assert loaded.shape == SHAPE
    for name, tensor in loaded.decoder.state_dict().items():
        assert torch.equal(tensor, held[name]), name
    assert is_arithmetic(load_tokenizer(whole.folder))
    assert not is_arithmetic(byte_tokenizer())
    record = json.loads((whole.folder / "training.json").read_text(encoding="utf-8"))
    assert record["problems"] == 3
    assert sorted(record["right_by_steps"]) == ["16", "5"]
    assert (whole.folder / "model.safetensors").stat().st_size < 3_000_000


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("prediction", ["same", "shifted"])
def test_a_model_is_adapted_and_still_loads_elsewhere(
    prediction: Prediction, precision: str, tmp_path: Path
) -> None:
    name = save_tiny(tmp_path / "model")
    subject = open_adaptable(name, prediction=prediction, mask_token_id=0, device="cpu")
    before = {key: t.clone() for key, t in subject.model.decoder.state_dict().items()}
    (tmp_path / "text.txt").write_text("It was a day, or two. " * 400, encoding="utf-8")
    corpus = open_corpus([str(tmp_path / "text.txt")], subject.tokenizer, length=64, seed=0)
    settings = replace(SETTINGS, precision=precision)  # type: ignore[arg-type]
    done = adapt(subject, CorpusLessons(corpus), tmp_path / "out", settings, MASKING, name="tiny")
    losses = [point["validation"]["loss"] for point in done.record["curve"] if point["validation"]]  # type: ignore[union-attr]
    assert losses[-1] < losses[0]
    loaded = DiffusionModel.from_pretrained(tmp_path / "out", device="cpu")
    assert (loaded.traits.mask_id, loaded.traits.prediction) == (0, prediction)
    assert loaded.traits.eos_ids == {2}
    after = loaded.decoder.state_dict()
    assert any(not torch.equal(tensor, after[key]) for key, tensor in before.items())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(10, 22)[None]
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask).logits
        found = loaded.decoder.logits(loaded.decoder(ids, torch.arange(12)[None]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert done.record["adapted_from"] == "tiny"


def test_the_mask_is_a_token_to_spare(tmp_path: Path) -> None:
    name = save_tiny(tmp_path)
    with pytest.raises(ConfigError, match="no special token to spare"):
        open_adaptable(name)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["Ā", "ā"]})
    tokenizer.save_pretrained(tmp_path)
    assert open_adaptable(name).model.traits.mask_id == tokenizer.convert_tokens_to_ids("ā")


def test_own_models_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path / "home"))
    shipped = tmp_path / "shipped"
    monkeypatch.setattr("kvfold.diffusion.own.SHIPPED", shipped)
    for name, command in OWN.items():
        with pytest.raises(ConfigError, match=f"{name}' is not made yet: run `{command}`"):
            DiffusionModel.from_pretrained(name)
    train_arithmetic(shipped / "arithmetic", SETTINGS, MASKING, problems=1)
    assert model_folder("arithmetic") == shipped / "arithmetic"
    made = train_arithmetic(own_home("arithmetic"), SETTINGS, MASKING, problems=1)
    assert model_folder("arithmetic") == own_home("arithmetic") == made.folder
    assert (own_home("arithmetic") / CHECKPOINT).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"rows": 0}, "rows is 0"), ({"least": 0.0}, "least is 0.0"), ({"validation": 0}, "valid")],
)
def test_settings_that_cannot_be_used_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MaskedLearner(arithmetic_model("same"), Sums(), replace(MASKING, **change))


def test_weights_of_half_precision_are_refused() -> None:
    model = arithmetic_model("same")
    model.decoder.to(torch.bfloat16)
    with pytest.raises(ConfigError, match="load them in float32"):
        MaskedLearner(model, Sums(), MASKING)
