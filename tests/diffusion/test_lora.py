"""Adapting by low-rank changes: what learns, what is left alone; a run goes on bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.diffusion import DiffusionModel
from kvfold.diffusion.learner import MaskedLearner, MaskingSettings
from kvfold.diffusion.train import Adaptable, CorpusLessons, TrainedModel, adapt, open_adaptable
from kvfold.errors import ArtifactError, ConfigError
from kvfold.training import TrainingSettings, open_corpus, read_checkpoint
from kvfold.training.checkpoint import CHECKPOINT
from tests.tiny_folder import save_tiny

SETTINGS = TrainingSettings(steps=4, learning_rate=3e-3, validate_every=2, checkpoint_every=2)
MASKING = MaskingSettings(rows=4, validation=6)
RANK, LAYERS, KINDS = 3, 3, 7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plain model, whose head is a matrix of its own, and a text beside it."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text("It was a day, or two. " * 400, encoding="utf-8")
    return save_tiny(folder)


def opened(base: str) -> Adaptable:
    return open_adaptable(base, mask_token_id=0, device="cpu")


def lessons(subject: Adaptable, base: str) -> CorpusLessons:
    text = str(Path(base) / "text.txt")
    return CorpusLessons(open_corpus([text], subject.tokenizer, length=64, seed=0))


def adapted(base: str, folder: Path, **options: Any) -> TrainedModel:
    subject = options.pop("subject", None) or opened(base)
    options = {"settings": SETTINGS, "masking": MASKING, "lora_rank": RANK, **options}
    return adapt(subject, lessons(subject, base), folder, **options)


def weights(model: DiffusionModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.decoder.state_dict().items()}


def assert_equal(found: DiffusionModel, expected: dict[str, torch.Tensor]) -> None:
    held = found.decoder.state_dict()
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(held[name], tensor), name


class StopError(Exception):
    """Breaks a run off."""


def stop(at: Any) -> None:
    if at.step == 3:
        raise StopError


def test_a_model_is_adapted_by_changes_of_a_low_rank(base: str, tmp_path: Path) -> None:
    before = weights(opened(base).model)
    done = adapted(base, tmp_path / "out")
    loaded = DiffusionModel.from_pretrained(tmp_path / "out", device="cpu")
    assert_equal(loaded, weights(done.model))
    changed = 0
    for name, tensor in loaded.decoder.state_dict().items():
        if name.startswith("layers.") and "norm" not in name:
            change = tensor.double() - before[name].double()
            values = torch.linalg.svdvals(change)
            assert values[0] > 1e-3, name
            assert values[RANK] < 1e-4 * values[0], "it is of the rank, but for rounding"
            changed += 1
        else:
            assert torch.equal(tensor, before[name]), name
    assert changed == LAYERS * KINDS
    assert not any(weight.requires_grad for weight in done.model.decoder.parameters())
    identity, curve = done.record["identity"], done.record["curve"]
    assert isinstance(identity, dict)
    assert identity["lora"]["rank"] == RANK
    assert isinstance(curve, list)
    assert curve[-1]["validation"]["loss"] < curve[0]["validation"]["loss"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_merged_model_is_what_was_validated(base: str, tmp_path: Path, precision: Any) -> None:
    settings = TrainingSettings(steps=3, learning_rate=3e-3, precision=precision)
    record = adapted(base, tmp_path / "out", settings=settings).record
    subject = opened(base)
    plain = MaskedLearner(
        DiffusionModel.from_pretrained(tmp_path / "out", device="cpu"),
        lessons(subject, base),
        MASKING,
    )
    with torch.no_grad():
        found = plain.validate()
    best = record["best_metrics"]
    assert isinstance(best, dict)
    assert found["loss"] == pytest.approx(
        best["loss"], rel=1e-5 if precision == "float32" else 1e-2
    )


def test_a_step_has_gradients_of_the_changes_alone(base: str) -> None:
    subject = opened(base)
    learner = MaskedLearner(subject.model, lessons(subject, base), MASKING, lora_rank=RANK)
    learner.step(0, torch.Generator().manual_seed(0)).loss.backward()
    learning = {id(weight) for weight in learner.module.parameters()}
    assert len(learning) == 2 * LAYERS * KINDS
    for name, weight in subject.model.decoder.named_parameters():
        assert (weight.grad is not None) == (id(weight) in learning), name


def test_what_breaks_off_changes_nothing_and_goes_on_bit_for_bit(base: str, tmp_path: Path) -> None:
    whole = adapted(base, tmp_path / "whole")
    subject = opened(base)
    before = weights(subject.model)
    with pytest.raises(StopError):
        adapted(base, tmp_path / "parts", subject=subject, on_progress=stop)
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert_equal(subject.model, before)
    parts = adapted(base, tmp_path / "parts", subject=subject, resume=True)
    assert parts.record["curve"] == whole.record["curve"]
    assert_equal(parts.model, weights(whole.model))
    held = read_checkpoint(tmp_path / "parts" / CHECKPOINT)
    assert len(held.module) == len(held.best) == 2 * LAYERS * KINDS
    assert {min(tensor.shape) for tensor in held.module.values()} == {RANK}
    model = (tmp_path / "whole" / "model.safetensors").stat().st_size
    assert (tmp_path / "parts" / CHECKPOINT).stat().st_size < model


def test_a_checkpoint_is_for_its_rank_and_its_weights(base: str, tmp_path: Path) -> None:
    with pytest.raises(StopError):
        adapted(base, tmp_path, on_progress=stop)
    for rank in (RANK + 1, None):
        with pytest.raises(ArtifactError, match="of another run"):
            adapted(base, tmp_path, resume=True, lora_rank=rank)
    other = opened(base)
    with torch.no_grad():
        other.model.decoder.embedding.weight.mul_(1.5)
    with pytest.raises(ArtifactError, match=r"of another run .*base"):
        adapted(base, tmp_path, resume=True, subject=other)


@pytest.mark.parametrize("rank", [0, 33])
def test_ranks_out_of_range_are_refused(base: str, tmp_path: Path, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"is {rank}: give a whole number from 1 to 32"):
        adapted(base, tmp_path / "out", lora_rank=rank)
    assert not (tmp_path / "out").exists()
