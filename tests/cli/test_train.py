"""`kvfold train`: what it writes and prints, how it goes on, and what it refuses at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

import kvfold
from kvfold.cli.app import run
from kvfold.cli.train_place import folder_for
from kvfold.errors import ConfigError
from kvfold.evict.artifact import FILE, PolicyArtifact
from kvfold.evict.train import CURVE
from kvfold.training.checkpoint import CHECKPOINT
from kvfold.training.loop import _Run
from tests.tiny_folder import save_tiny

QUICK = [
    *("--texts", "text.txt", "--steps", "3", "--every", "1", "--ranker-texts", "0"),
    *("--length", "96", "--horizon", "8", "--block", "4", "--budgets", "0.3", "--rollouts", "2"),
    *("--validation", "1", "--sinks", "2", "--recent", "8"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("private") / "tiny-model")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = (f"The {n}th letter was read on day {n * n % 97}.\n\n" for n in range(400))
    Path("text.txt").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def train(model: str, *arguments: str) -> int:
    return run(["train", "distill", "--model", model, *QUICK, *arguments])


def test_table_files_and_progress(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvfold.cli.console.SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr("kvfold.cli.console.now_and_then", lambda say: say)
    assert train(model, "--out", "new/policy") == 0
    shown, said = capsys.readouterr()
    assert "best after" in shown
    assert sorted(path.name for path in Path("new/policy").iterdir()) == [
        *(CHECKPOINT, CURVE, FILE),
    ]
    assert imread(Path("new/policy") / CURVE).ndim == 3
    steps = [line for line in said.splitlines() if " step " in line]
    assert len(steps) == 4
    assert "tokens/s" not in steps[0]
    for number, line in enumerate(steps[1:], start=1):
        assert f"step {number} of 3: kl " in line
        rate = line.partition(" tokens/s")[0].rpartition(" ")[2]
        assert int(rate) > 0
    call = 'kvfold.make_cache(model, "distill", policy="new/policy", sinks=2, recent=8)'
    assert f"use it: {call}" in said
    loaded, _ = kvfold.load(model)
    eval(call, {"kvfold": kvfold, "model": loaded})


def test_the_call_names_the_share_of_whole_heads_it_was_trained_with(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "--whole", "0.2") == 0
    assert "whole=0.2)" in capsys.readouterr().err


def test_json_is_one_document_without_private_folders(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "--json", "--dtype", "bfloat16", "--ranker-texts", "1") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["policy"] == f"distill-policy/{FILE}"
    assert document["picture"] == f"distill-policy/{CURVE}"
    assert document["steps"] == 3
    assert [point["step"] for point in document["curve"]] == [0, 1, 2, 3]
    assert PolicyArtifact.from_pretrained("distill-policy").trained_on == "tiny-model"


def test_an_interrupted_run_says_how_to_go_on_and_does(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = _Run.report

    def interrupt(self: _Run, *arguments: object) -> None:
        report(self, *arguments)
        if self.done == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr(_Run, "report", interrupt)
        assert train(model, "--out", "run") == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert "run holds the run so far: the same command with --resume goes on with it\n" in err
    assert err.endswith("kvfold: interrupted\n")
    assert train(model, "--out", "run") == 2
    assert "resume it, or choose another" in capsys.readouterr().err
    assert train(model, "--out", "run", "--resume") == 0
    assert train(model, "--out", "whole") == 0
    run_, whole = (PolicyArtifact.from_pretrained(folder) for folder in ("run", "whole"))
    assert run_.digest() == whole.digest()
    assert run_.record["curve"] == whole.record["curve"]


def test_an_interruption_before_the_first_step_leaves_nothing_to_go_on_with(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvfold.evict.learner.PolicyLearner.prepare", interrupt)
    assert train(model, "--out", "run") == 130
    assert "resume" not in capsys.readouterr().err
    assert not Path("run").exists()


def test_of_several_processes_the_first_tries_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert folder_for("text.txt") == Path("text.txt")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="cannot write to the folder"):
        folder_for("text.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", ""], "the name of the output folder is empty"),
        (["--out", "text.txt/deeper"], "cannot write to the folder"),
        (["--out", "text.txt"], "cannot write to the folder"),
        (["--out", "held"], "held holds the checkpoint of a run"),
        (["--out", "other", "--resume"], "other holds files but no checkpoint.safetensors"),
        (["--out", "held", "--resume"], "is damaged or not a checkpoint"),
        (["--model", " "], "the model name is empty"),
        (["--dtype", "int8"], "dtype 'int8' is not one of"),
        (["--length", "18"], "excerpts of 18 tokens leave no prompt before 8 scored ones"),
        (["--budgets", "512"], "--budgets '512': give shares such as"),
        (["--budgets", "64MiB"], "--budgets '64MiB': give shares such as"),
        (["--budgets", ","], "--budgets ',': give shares such as"),
        (["--budgets", "0.2,abc"], "budget 'abc'"),
        (["--budgets", "0"], "budget"),
        (["--law", "uniform"], "--law 'uniform': give plackett-luce or"),
        (["--features", "mass,height"], "features height: choose from mass"),
        (["--features", ""], "features are missing"),
        (["--steps", "0"], "steps"),
        (["--horizon", "0"], "horizon is 0"),
        (["--block", "9"], "block is 9: give 1 to the horizon, 8"),
        (["--rollouts", "0"], "rollouts is 0"),
        (["--validation", "0"], "validation is 0"),
        (["--entropy-bonus", "nan"], "entropy_bonus is nan"),
        (["--clip", "0"], "clip is 0"),
        (["--learning-rate", "0"], "learning_rate is 0.0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_code_2_before_the_model_is_loaded(
    arguments: list[str],
    message: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("kvfold.cli.train.load", load)
    for folder, name in (("held", CHECKPOINT), ("other", "notes.txt")):
        Path(folder).mkdir()
        Path(folder, name).touch()
    before = sorted(here.rglob("*"))
    assert train("default", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert sorted(here.rglob("*")) == before
