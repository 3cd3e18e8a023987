"""`kvfold train sekv`: what it writes and prints, how it goes on, and what it refuses at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.image import imread

from kvfold.cli.app import run
from kvfold.training.checkpoint import CHECKPOINT
from kvfold.training.loop import _Run
from kvfold.zoom.gates_artifact import FILE, GatesArtifact
from kvfold.zoom.train import CURVE
from tests.tiny_folder import save_tiny

QUICK = [
    *("--texts", "text.txt", "--steps", "3", "--every", "1", "--first-texts", "1"),
    *("--lengths", "64,96", "--queries", "4", "--steps-a-text", "2", "--validation", "1"),
    *("--sinks", "2", "--window", "8", "--shortest", "4", "--longest", "8"),
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
    return run(["train", "sekv", "--model", model, *QUICK, *arguments])


def test_table_files_and_progress(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvfold.cli.console.SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr("kvfold.cli.console.now_and_then", lambda say: say)
    assert train(model, "--out", "new/gates") == 0
    shown, said = capsys.readouterr()
    assert "best after" in shown
    assert sorted(path.name for path in Path("new/gates").iterdir()) == [
        *(CHECKPOINT, CURVE, FILE),
    ]
    assert imread(Path("new/gates") / CURVE).ndim == 3
    assert "first gates: reading" in said
    steps = [line for line in said.splitlines() if " step " in line]
    assert len(steps) == 4
    assert all("validation loss " in line for line in steps)
    for number, line in enumerate(steps[1:], start=1):
        assert f"step {number} of 3: kl " in line
        assert all(f", {name} " in line for name in ("zoom", "recon", "recall", "expanded"))
    assert 'kvfold.make_cache(model, "sekv", gates="new/gates")' in said


def test_json_is_one_document_without_private_folders(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, "--json", "--dtype", "bfloat16") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["gates"] == f"sekv-gates/{FILE}"
    assert document["picture"] == f"sekv-gates/{CURVE}"
    assert document["steps"] == 3
    assert [point["step"] for point in document["curve"]] == [0, 1, 2, 3]
    assert document["settings"]["weight_decay"] == 0.01
    assert document["identity"]["settings"]["queries"] == 4
    assert [corpus["length"] for corpus in document["identity"]["corpora"]] == [64, 96]
    artifact = GatesArtifact.from_pretrained("sekv-gates")
    assert artifact.trained_on == "tiny-model"
    assert str(artifact.record["command"]).startswith("kvfold")


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
    assert train(model, "--out", "run") == 2
    assert "resume it, or choose another" in capsys.readouterr().err
    assert train(model, "--out", "run", "--resume") == 0
    assert train(model, "--out", "whole") == 0
    run_, whole = (GatesArtifact.from_pretrained(folder) for folder in ("run", "whole"))
    assert run_.digest() == whole.digest()
    assert run_.record["curve"] == whole.record["curve"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", ""], "the name of the output folder is empty"),
        (["--out", "text.txt"], "cannot write to the folder"),
        (["--out", "held"], "held holds the checkpoint of a run"),
        (["--out", "other", "--resume"], "other holds files but no checkpoint.safetensors"),
        (["--model", " "], "the model name is empty"),
        (["--dtype", "int8"], "dtype 'int8' is not one of"),
        (["--lengths", "64,18"], "excerpts of 18 tokens leave no span"),
        (["--lengths", "64;96"], "--lengths '64;96': give numbers of tokens such as"),
        (["--lengths", ","], "--lengths ',': give numbers of tokens such as"),
        (["--lengths", "-64"], "--lengths '-64': give numbers of tokens such as"),
        (["--steps", "0"], "steps"),
        (["--queries", "0"], "queries is 0"),
        (["--steps-a-text", "0"], "steps_a_text is 0"),
        (["--zoom", "-1"], "zoom is -1.0"),
        (["--budget", "nan"], "budget is nan"),
        (["--first-expanded", "1"], "first_expanded is 1.0"),
        (["--longest", "33"], "longest is 33: give at most 32"),
        (["--shortest", "9"], "shortest is 9: give 1 to longest, 8"),
        (["--learning-rate", "0"], "learning_rate is 0.0"),
        (["--every", "0"], "validate_every is 0"),
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

    monkeypatch.setattr("kvfold.cli.train_sekv.load", load)
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
