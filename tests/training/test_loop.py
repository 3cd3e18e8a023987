"""The loop learns, says what it did, and refuses what it cannot train with."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from kvfold.artifacts import json_text
from kvfold.errors import ConfigError, KVFoldError
from kvfold.training import (
    CHECKPOINT,
    Checkpoint,
    Progress,
    StepOutcome,
    TrainingSettings,
    read_checkpoint,
    train,
)
from kvfold.training.loop import step_generator
from tests.processes import environment
from tests.training.toy import SETTINGS, Regression, assert_same_run, contents, same_tensors

TRUE_AT_EYE = torch.tensor([[2.3], [-0.7], [0.8]])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The run without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    train(Regression(), SETTINGS, folder)
    return read_checkpoint(folder / CHECKPOINT)


def test_it_learns(tmp_path: Path) -> None:
    learner = Regression()
    settings = replace(SETTINGS, steps=300, validate_every=50, weight_decay=0.0)
    record = train(learner, settings, tmp_path)
    first, last = record.curve[0], record.curve[-1]
    assert first["validation"]["error"] > 3
    assert last["validation"]["error"] < 1e-4
    assert last["train"]["loss"] < 1e-4
    assert torch.allclose(learner.module(torch.eye(3)), TRUE_AT_EYE, atol=0.02)


def test_the_record_says_what_happened(tmp_path: Path) -> None:
    record = train(Regression(), SETTINGS, tmp_path)
    assert [point["step"] for point in record.curve] == list(range(24))
    validated = [point["step"] for point in record.curve if point["validation"]]
    assert validated == [0, 5, 10, 15, 20, 23]
    assert record.curve[0]["train"] == {}
    names = {"average", "loss", "learning_rate", "gradient_norm"}
    assert all(set(point["train"]) == names for point in record.curve[1:])
    rates = [point["train"]["learning_rate"] for point in record.curve[1:]]
    assert rates == [SETTINGS.learning_rate_at(index) for index in range(23)]
    errors = {p["step"]: p["validation"]["error"] for p in record.curve if p["validation"]}
    assert record.best_metrics == {"error": min(errors.values()), "undefined": None}
    assert errors[record.best_step] == min(errors.values())
    assert (record.steps, record.criterion, record.settings) == (23, "error", SETTINGS)
    assert record.environment["torch"] == torch.__version__
    assert record.seconds > 0
    plain = json.loads(json_text(record.to_dict()))
    assert plain["settings"] == SETTINGS.to_dict()
    assert plain["curve"] == record.curve


def test_the_same_seed_gives_the_same_run(tmp_path: Path, whole: Checkpoint) -> None:
    train(Regression(), SETTINGS, tmp_path / "same")
    assert_same_run(read_checkpoint(tmp_path / "same" / CHECKPOINT), whole)
    train(Regression(), replace(SETTINGS, seed=1), tmp_path / "other")
    other = read_checkpoint(tmp_path / "other" / CHECKPOINT)
    assert not same_tensors(other.module, whole.module)


def test_the_best_validation_is_kept(tmp_path: Path) -> None:
    learner, states = Regression(), {}
    learner.errors = [5.0, 3.0, 1.0, 1.0, 2.0, 4.0]

    def remember(progress: Progress) -> None:
        state = learner.module.state_dict()
        states[progress.step] = {name: tensor.clone() for name, tensor in state.items()}

    record = train(learner, SETTINGS, tmp_path, on_progress=remember)
    assert (record.best_step, record.best_metrics) == (10, {"error": 1.0})
    assert same_tensors(dict(learner.module.state_dict()), states[10])
    saved = read_checkpoint(tmp_path / CHECKPOINT)
    assert same_tensors(saved.best, states[10])
    assert same_tensors(saved.module, states[23])


def test_weights_that_only_get_worse_are_the_first(tmp_path: Path) -> None:
    learner = Regression()
    learner.errors = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    before = {name: tensor.clone() for name, tensor in learner.module.state_dict().items()}
    record = train(learner, SETTINGS, tmp_path)
    assert record.best_step == 0
    assert same_tensors(dict(learner.module.state_dict()), before)


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[Progress] = []
    record = train(Regression(), SETTINGS, tmp_path, on_progress=told.append)
    assert [each.step for each in told] == list(range(24))
    assert {each.total for each in told} == {23}
    assert [each.metrics for each in told] == [point["train"] for point in record.curve]
    assert [each.validation for each in told] == [point["validation"] for point in record.curve]
    assert told[0].seconds_left is None
    assert all(each.seconds_left is not None and each.seconds_left >= 0 for each in told[1:])
    assert told[-1].seconds_left == 0


def test_long_gradients_are_scaled_down(tmp_path: Path) -> None:
    one, two = Regression(), Regression()
    two.scale = 1e4
    clip = replace(SETTINGS, steps=5, warmup_steps=0, gradient_clip=0.01)
    records = [train(each, clip, tmp_path / str(i)) for i, each in enumerate((one, two))]
    first, second = (record.curve[1]["train"]["gradient_norm"] for record in records)
    assert second == pytest.approx(1e4 * first)
    # Both gradients have the length of the clip, so both learn the same.
    for name, tensor in one.module.state_dict().items():
        assert torch.allclose(tensor.float(), two.module.state_dict()[name].float(), atol=1e-4)


def test_bfloat16_runs_the_forward_in_it_and_keeps_the_weights(tmp_path: Path) -> None:
    learner, seen = Regression(), set()
    learner.module[0].register_forward_hook(lambda *call: seen.add(call[2].dtype))
    record = train(learner, replace(SETTINGS, steps=200, precision="bfloat16"), tmp_path)
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in learner.module.parameters()} == {torch.float32}
    assert record.best_metrics["error"] < 0.01


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    learner = Regression()
    learner.module[0].requires_grad_(False)
    before = learner.module[0].weight.clone()
    train(learner, SETTINGS, tmp_path)
    assert torch.equal(learner.module[0].weight, before)
    names = {n.rpartition(".")[0] for n in read_checkpoint(tmp_path / CHECKPOINT).optimiser}
    assert names == {"1.weight", "1.bias"}
    learner.module.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameters that want a gradient"):
        train(learner, SETTINGS, tmp_path / "none")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_after_the_last_good_step(
    tmp_path: Path, value: float
) -> None:
    learner = Regression()

    def spoil(index: int) -> None:
        learner.scale = value if index == 9 else 1.0

    learner.before_step = spoil
    with pytest.raises(KVFoldError, match=f"the loss is {value} at step 10: start in another"):
        train(learner, SETTINGS, tmp_path)
    saved = read_checkpoint(tmp_path / CHECKPOINT)
    assert saved.step == 9
    assert all(torch.isfinite(tensor).all() for tensor in saved.module.values())


def test_a_gradient_that_is_no_number_stops(tmp_path: Path) -> None:
    learner = Regression()
    learner.module[0].weight.register_hook(lambda gradient: gradient / 0)
    with pytest.raises(KVFoldError, match="the norm of the gradient is inf at step 1"):
        train(learner, SETTINGS, tmp_path)
    assert contents(tmp_path) == {}


def test_a_criterion_that_is_no_number_or_missing_stops(tmp_path: Path) -> None:
    learner = Regression()
    learner.errors = [1.0, math.nan]
    with pytest.raises(KVFoldError, match="the validation's error is nan at step 5"):
        train(learner, SETTINGS, tmp_path)
    assert read_checkpoint(tmp_path / CHECKPOINT).step == 4
    learner = Regression()
    learner.criterion = "loss"
    with pytest.raises(ConfigError, match="gave error, undefined but not its criterion loss"):
        train(learner, SETTINGS, tmp_path / "missing")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"steps": 0}, "steps is 0: give a whole number, at least 1"),
        ({"steps": 2.5}, "steps is 2.5: give"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0: give a number above 0"),
        ({"learning_rate": math.nan}, "learning_rate is nan"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0: give 0 or more"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"warmup_steps": 23}, "warmup_steps is 23: give fewer than the 23 steps"),
        ({"final_share": 1.5}, "final_share is 1.5: give a share from 0 to 1"),
        ({"gradient_clip": 0.0}, "gradient_clip is 0.0"),
        ({"seed": -1}, "seed is -1"),
        ({"validate_every": 0}, "validate_every is 0"),
        ({"checkpoint_every": True}, "checkpoint_every is True"),
        ({"precision": "float16"}, "precision is 'float16': give float32 or bfloat16"),
    ],
)
def test_settings_out_of_range_are_refused(
    tmp_path: Path, changes: dict[str, object], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        train(Regression(), replace(SETTINGS, **changes), tmp_path / "run")
    assert str(caught.value).startswith(expected)
    assert contents(tmp_path) == {}


def test_the_schedule() -> None:
    settings = TrainingSettings(steps=14, learning_rate=2.0, warmup_steps=4, final_share=0.1)
    rates = [settings.learning_rate_at(index) for index in range(15)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[9] == pytest.approx(2.0 * 0.55)
    assert rates[14] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_one_process_of_accelerate_is_a_plain_run(tmp_path: Path, whole: Checkpoint) -> None:
    train(Regression(), SETTINGS, tmp_path, accelerator=Accelerator(cpu=True))
    found = read_checkpoint(tmp_path / CHECKPOINT)
    assert found.curve == whole.curve
    assert same_tensors(found.module, whole.module)


TOGETHER = """
import sys
import torch
from pathlib import Path
from accelerate import Accelerator
from safetensors.torch import save_file
from kvfold.training import train
from tests.training.toy import SETTINGS, Regression

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
folder, rank = Path(sys.argv[1]), accelerator.process_index
learner = Regression(seed=rank)
train(learner, SETTINGS, folder / ("run" if rank == 0 else "other"), accelerator=accelerator)
save_file(dict(learner.module.state_dict()), folder / f"weights{rank}")
accelerator.end_training()
"""


def test_two_processes_learn_from_the_mean_of_their_gradients(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    root = str(Path(__file__).parents[2])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, str(tmp_path)],
            env=environment(RANK=rank, LOCAL_RANK=rank, ACCELERATE_USE_CPU="true", **shared),
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        ends = [each.communicate(timeout=300) for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0, 0], ends
    assert (tmp_path / "weights0").read_bytes() == (tmp_path / "weights1").read_bytes()
    assert list((tmp_path / "other").iterdir()) == []
    found = read_checkpoint(tmp_path / "run" / CHECKPOINT)
    train(Both(), SETTINGS, tmp_path / "both")
    alone = read_checkpoint(tmp_path / "both" / CHECKPOINT)
    for kind, name in (("train", "loss"), ("validation", "error")):
        one, two = (
            [point[kind][name] for point in each.curve if name in point[kind]]
            for each in (found, alone)
        )
        assert len(one) > 5
        assert one == pytest.approx(two, rel=1e-4)


class Both(Regression):
    """Takes both processes' batches in one step."""

    def step(self, index: int, generator: torch.Generator) -> StepOutcome:
        own = (step_generator(SETTINGS.seed, index, process) for process in range(2))
        one, two = (super(Both, self).step(index, each) for each in own)
        return StepOutcome((one.loss + two.loss) / 2, one.metrics)
