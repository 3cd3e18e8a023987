"""Teaching a specialist: what learns, what it leaves alone, and that a run goes on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvfold.errors import ConfigError
from kvfold.models import load_model
from kvfold.models.adapter import AdapterArtifact
from kvfold.training import TrainingSettings, open_corpus
from kvfold.training.checkpoint import CHECKPOINT, read_checkpoint
from kvfold.transfer.specialise import CURVE, Specialised, specialise
from kvfold.transfer.specialist import SpecialistLearner, SpecialistSettings
from tests.tiny_folder import save_tiny

SETTINGS = TrainingSettings(steps=4, learning_rate=1e-2, validate_every=2, checkpoint_every=2)
METHOD = SpecialistSettings(rank=2, step_tokens=1000, validation=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base") / "tiny")


def taught(base: str, folder: Path, **options: object) -> Specialised:
    model, tokenizer = load_model(base)
    corpora = [open_corpus(["records"], tokenizer, length=n, seed=0) for n in (400, 600)]
    return specialise(model, corpora, folder, SETTINGS, METHOD, name=base, **options)  # pyright: ignore


def learner(base: str) -> SpecialistLearner:
    model, tokenizer = load_model(base)
    corpora = [open_corpus(["records"], tokenizer, length=n, seed=0) for n in (400, 600)]
    return SpecialistLearner(model, corpora, METHOD, seed=0)


def test_the_model_says_the_same_before_the_first_step(base: str) -> None:
    plain, tokenizer = load_model(base)
    ids = torch.tensor([tokenizer("The city of Edda is Kestwick.")["input_ids"]])
    model, _ = load_model(base)
    SpecialistLearner(
        model, [open_corpus(["records"], tokenizer, length=400, seed=0)], METHOD, seed=0
    )
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)


def test_the_loss_is_that_of_the_answer(base: str) -> None:
    found = learner(base)
    model, tokenizer = load_model(base)
    corpus = open_corpus(["records"], tokenizer, length=400, seed=0)
    losses = []
    for index in range(1_000_000, 1_000_001):
        excerpt = corpus.excerpt(index, "validation")
        assert excerpt.scored is not None
        logits = model(excerpt.tokens[None]).logits[0, -excerpt.scored - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, excerpt.tokens[-excerpt.scored :]))
    with torch.no_grad():
        loss, _ = found._judged([corpus.excerpt(1_000_000, "validation")])
    torch.testing.assert_close(loss, torch.stack(losses).mean())


def test_only_the_changes_learn(base: str) -> None:
    found = learner(base)
    outcome = found.step(0, torch.Generator().manual_seed(0))
    outcome.loss.backward()
    learning = {id(weight) for weight in found.module.parameters()}
    for name, weight in found._model.named_parameters():
        assert (weight.grad is not None) == (id(weight) in learning), name
    assert len(found.changes()) == 3 * 7


def test_a_trained_adapter_is_the_model_that_was_trained(base: str, tmp_path: Path) -> None:
    trained = taught(base, tmp_path / "run")
    assert trained.curve.name == CURVE
    record = trained.artifact.record
    assert record["steps"] == 4
    assert isinstance(record["best_metrics"], dict)
    assert set(record["best_metrics"]) == {"loss", "right", "right_400", "right_600"}
    found = AdapterArtifact.from_pretrained(trained.adapter)
    assert any(bool(up.any()) for _, up in found.changes.values())
    model, tokenizer = load_model(tmp_path / "run")
    corpora = [open_corpus(["records"], tokenizer, length=n, seed=0) for n in (400, 600)]
    again = SpecialistLearner(model, corpora, METHOD, seed=0)
    with torch.no_grad():
        loss = again.validate()["loss"]
    assert loss == pytest.approx(record["best_metrics"]["loss"], rel=2e-2)


def test_a_resumed_run_is_the_uninterrupted_one(base: str, tmp_path: Path) -> None:
    taught(base, tmp_path / "whole")

    def stop(at: object) -> None:
        if at.step == 3:  # pyright: ignore[reportAttributeAccessIssue]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        taught(base, tmp_path / "parts", on_progress=stop)
    taught(base, tmp_path / "parts", resume=True)
    one, other = (read_checkpoint(tmp_path / name / CHECKPOINT) for name in ("whole", "parts"))
    for name, weight in one.module.items():
        torch.testing.assert_close(weight, other.module[name], rtol=0, atol=0)
    assert [point["validation"] for point in one.curve] == [p["validation"] for p in other.curve]


@pytest.mark.parametrize("name", ["rank", "step_tokens", "validation", "alpha"])
def test_settings_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        SpecialistSettings(**{name: 0}).check()
