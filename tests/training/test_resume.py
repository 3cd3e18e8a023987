"""However a run is cut into sessions it is the same run; what is not the same is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvfold.errors import ArtifactError, ConfigError, KVFoldError
from kvfold.training import (
    CHECKPOINT,
    Checkpoint,
    Progress,
    TrainingSettings,
    read_checkpoint,
    train,
)
from tests.training.toy import SETTINGS, Regression, assert_same_run, contents, same_tensors


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The run without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    train(Regression(), SETTINGS, folder)
    return read_checkpoint(folder / CHECKPOINT)


@pytest.mark.parametrize("after", [1, 4, 7, 10, 22])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    tmp_path: Path, whole: Checkpoint, after: int, error: type[BaseException]
) -> None:
    learner = Regression()

    def interrupt(index: int) -> None:
        # The learner's own state and a buffer have gone on by then: half a step.
        if index == after:
            raise error

    learner.before_step = interrupt
    with pytest.raises(error):
        train(learner, SETTINGS, tmp_path)
    assert list(contents(tmp_path)) == [CHECKPOINT]
    assert read_checkpoint(tmp_path / CHECKPOINT).step == after
    resumed = Regression(seed=5)
    record = train(resumed, SETTINGS, tmp_path, resume=True)
    assert_same_run(read_checkpoint(tmp_path / CHECKPOINT), whole)
    assert record.curve == whole.curve
    assert same_tensors(dict(resumed.module.state_dict()), whole.best)


def test_an_interruption_inside_the_update_goes_back_to_the_step_before(
    tmp_path: Path, whole: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, update = Regression(), torch.optim.AdamW.step

    def half(optimiser: torch.optim.AdamW) -> None:
        update(optimiser)
        if int(learner.module.batches) == 12:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", half)
        with pytest.raises(KeyboardInterrupt):
            train(learner, SETTINGS, tmp_path)
    assert read_checkpoint(tmp_path / CHECKPOINT).step == 11
    # The same learner, as it was left, is put back too.
    train(learner, SETTINGS, tmp_path, resume=True)
    assert_same_run(read_checkpoint(tmp_path / CHECKPOINT), whole)


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(
    tmp_path: Path, whole: Checkpoint
) -> None:
    learner, kept = Regression(), tmp_path / "kept"
    kept.mkdir()

    def copy(progress: Progress) -> None:
        if progress.step == 17:
            (kept / CHECKPOINT).write_bytes((tmp_path / "run" / CHECKPOINT).read_bytes())

    train(learner, SETTINGS, tmp_path / "run", on_progress=copy)
    assert read_checkpoint(kept / CHECKPOINT).step == 14
    train(Regression(), SETTINGS, kept, resume=True)
    assert_same_run(read_checkpoint(kept / CHECKPOINT), whole)


def test_interrupted_again_and_again(tmp_path: Path, whole: Checkpoint) -> None:
    for session in range(30):
        learner = Regression(seed=session if session else 0)
        left = [2]

        def interrupt(index: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        learner.before_step = interrupt
        try:
            train(learner, SETTINGS, tmp_path, resume=True)
        except KeyboardInterrupt:
            continue
        break
    assert session == 11
    assert_same_run(read_checkpoint(tmp_path / CHECKPOINT), whole)


def test_a_finished_run_is_only_read(tmp_path: Path, whole: Checkpoint) -> None:
    record = train(Regression(), SETTINGS, tmp_path)
    before, learner, told = contents(tmp_path), Regression(seed=3), []
    again = train(learner, SETTINGS, tmp_path, resume=True, on_progress=told.append)
    assert (again.curve, again.best_step) == (record.curve, record.best_step)
    assert same_tensors(dict(learner.module.state_dict()), whole.best)
    assert told == []
    assert contents(tmp_path) == before
    assert again.seconds >= record.seconds - 1


@pytest.fixture
def started(tmp_path: Path) -> Path:
    """A run of some steps."""
    learner = Regression()

    def interrupt(index: int) -> None:
        if index == 9:
            raise KeyboardInterrupt

    learner.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        train(learner, SETTINGS, tmp_path / "run")
    return tmp_path / "run"


def assert_refused(
    folder: Path,
    error: type[KVFoldError],
    text: str,
    *,
    learner: Regression | None = None,
    settings: TrainingSettings = SETTINGS,
    resume: bool = True,
) -> None:
    """Refused with the text, the folder and the learner as they were."""
    learner = learner or Regression()
    weights = {name: tensor.clone() for name, tensor in learner.module.state_dict().items()}
    before = contents(folder)
    with pytest.raises(error) as caught:
        train(learner, settings, folder, resume=resume)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(folder) == before
    assert same_tensors(dict(learner.module.state_dict()), weights)


def test_a_run_that_is_not_the_same_is_refused(started: Path) -> None:
    other = Regression(data="parabola")
    text = "of another run (data 'line' there, 'parabola' here)"
    assert_refused(started, ArtifactError, text, learner=other)
    longer = replace(SETTINGS, steps=40, seed=3)
    text = "other settings (seed 0 there, 3 here, steps 23 there, 40 here)"
    assert_refused(started, ConfigError, text, settings=longer)
    text = "other weights (0.weight [4, 3] there, [4, 2] here)"
    assert_refused(started, ArtifactError, text, learner=Regression(width=2))


def test_a_new_run_does_not_replace_a_checkpoint(started: Path) -> None:
    text = f"{started} holds the checkpoint of a run: resume it, or choose another"
    assert_refused(started, ConfigError, text, resume=False)


def test_what_holds_no_checkpoint_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    text = f"{tmp_path} holds files but no {CHECKPOINT} to resume"
    assert_refused(tmp_path, ConfigError, text)
    train(Regression(), replace(SETTINGS, steps=5), tmp_path)
    assert sorted(contents(tmp_path)) == [CHECKPOINT, "notes.txt"]


@pytest.mark.parametrize("made", [False, True])
def test_resuming_where_nothing_is_starts_anew(
    tmp_path: Path, whole: Checkpoint, made: bool
) -> None:
    folder = tmp_path / "new" / "deeper"
    if made:
        folder.mkdir(parents=True)
    train(Regression(), SETTINGS, folder, resume=True)
    assert_same_run(read_checkpoint(folder / CHECKPOINT), whole)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.9999])
def test_a_truncated_checkpoint_is_refused(started: Path, share: float) -> None:
    path = started / CHECKPOINT
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    assert_refused(started, ArtifactError, "is damaged or not a checkpoint of kvfold")


def test_a_folder_that_cannot_be_made_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    learner = Regression()
    with pytest.raises(ArtifactError, match="cannot write"):
        train(learner, SETTINGS, tmp_path / "file" / "run", resume=True)
    assert int(learner.module.batches) == 0


def test_other_versions_are_warned_of(
    started: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvfold.training.loop.versions", lambda: {"torch": "9.9"})
    with caplog.at_level(logging.WARNING):
        train(Regression(), SETTINGS, started, resume=True)
    assert "9.9" in caplog.text
    assert torch.__version__ in caplog.text
