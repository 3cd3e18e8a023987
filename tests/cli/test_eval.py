"""`kvfold eval`: tables, files, resuming, and what it refuses before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfold.cli.app import run
from tests.tiny_folder import POSITIONS, save_tiny

QUICK = [
    *("--methods", "streaming,small=snapkv:kernel=3", "--budgets", "0.25", "--samples", "2"),
    *("--length", "300", "--tokens", "4", "--max-new-tokens", "4", "--batch", "2"),
]


def visible(folder: Path) -> list[str]:
    """Names of the files that are for the user."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFOLD_DATA", raising=False)


def test_tables_files_and_resuming(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["eval", "--model", model, "--out", str(out), "--baseline", "small", *QUICK]
    assert run(arguments) == 0
    shown, said = capsys.readouterr()
    for expected in (
        "prose: 2 samples",
        "niah: 2",
        "all: 4",
        "streaming",
        "small",
        "nats",
        "KL less",
        "measured while evaluating, not a benchmark",
        "first token s",
    ):
        assert expected in shown
    assert said.startswith("  0% prose 1 to 2: full\n")
    assert "eval.json" in said
    names = visible(out)
    assert names == [
        *("eval.html", "eval.json", "eval.md", "eval.png", "results.jsonl", "tradeoff.png"),
    ]
    document = json.loads((out / "eval.json").read_text(encoding="utf-8"))
    assert document["command"].startswith(f"kvfold eval --model {model} --methods streaming,small=")
    assert "--baseline small" in document["command"]
    assert run(arguments) == 2
    assert "give --resume" in capsys.readouterr().err
    assert run([*arguments, "--resume", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["rows"] == document["rows"]
    assert again["summaries"] == document["summaries"]
    assert again["costs"] == document["costs"]


def test_needles_by_length_and_depth_with_the_question_later(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--sets", "niah,niah-multikey", "--protocol", "agnostic", "--depths", "2"]
    arguments = ["eval", "--model", model, "--out", str(tmp_path), *QUICK, *grid]
    assert run([*arguments, "--length", "700,800"]) == 0
    shown, said = capsys.readouterr()
    assert "niah-multikey, right answers by length, protocol agnostic" in shown
    assert "niah at 700" in shown
    assert "niah-multikey.png" in said
    names = visible(tmp_path)
    assert names == [
        *(
            "eval.html",
            "eval.json",
            "eval.md",
            "eval.png",
            "niah-multikey.png",
            "niah.png",
            "results.jsonl",
            "tradeoff.png",
        ),
    ]
    document = json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))
    assert "--length 700,800 --protocol agnostic --depths 2" in document["command"]
    assert {(row["length"], row["depth"]) for row in document["rows"]} == {
        *((700, 0.0), (700, 1.0), (800, 0.0), (800, 1.0)),
    }
    assert {cell["length"] for cell in document["grid"]} == {700, 800, None}


def test_json_is_the_only_thing_on_stdout(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", "--model", model, "--out", str(tmp_path), "--json", *QUICK]
    assert run([*arguments, "--sets", "niah"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["sets"] == ["niah"]
    assert document["settings"]["baseline"] is None
    assert document["differences"] == []
    assert len(document["rows"]) == 6
    assert {row["method"] for row in document["rows"]} == {"full", "streaming", "small"}


def test_ruler_stands_for_its_sets(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--methods", "full,streaming", "--budgets", "0.1", "--samples", "1"]
    options = ["--tasks", "ruler", "--length", "1200", "--max-new-tokens", "2", "--json"]
    assert run(["eval", "--model", model, "--out", str(tmp_path), *quick, *options]) == 0
    document = json.loads(capsys.readouterr().out)
    families = [f"ruler-{name}" for name in ("multivalue", "multiquery", "vt", "cwe", "fwe")]
    numbered = [f"ruler-{name}-{at}" for name in ("single", "multikey") for at in (1, 2, 3)]
    assert document["settings"]["sets"] == [*numbered, *families]
    named = ",".join(document["settings"]["sets"])
    assert f"--sets {named} --samples 1 --length 1200" in document["command"]
    assert len(document["rows"]) == 2 * 11
    assert {row["found"] for row in document["rows"]} == {0}


def test_answers_may_be_as_long_as_a_set_needs(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["--methods", "streaming", "--budgets", "0.1", "--samples", "1", "--length", "900"]
    options = ["--out", str(tmp_path), "--sets", "niah,ruler-vt", "--json"]
    assert run(["eval", "--model", model, *options, *quick]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["answer_tokens"] == {"niah": 32, "ruler-vt": 40}
    assert max(row["answer_tokens"] for row in document["rows"] if row["set"] == "niah") <= 32
    assert "max-new-tokens" not in document["command"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", "0"], "budget 0 keeps nothing"),
        (["--budgets", "abc"], "'abc' is not an amount"),
        (["--budgets", ","], "no budget is named"),
        (["--budgets", "64MiB"], "shared by a batch"),
        (["--methods", "best"], "unknown method 'best'"),
        (["--methods", "full"], "no method is named"),
        (["--methods", "h2o:recent"], "option 'recent' has no value"),
        (["--methods", "h2o:often=3"], "h2o has no option 'often'"),
        (["--methods", "h2o,h2o"], "named twice"),
        (["--sets", "riddle"], "unknown set 'riddle'"),
        (["--tasks", "ruler,ruler-vt"], "set 'ruler-vt' is named twice"),
        (["--tasks", "ruler-qa"], "set KVFOLD_DATA"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 is below 1"),
        (["--sets", "wikitext"], "set KVFOLD_DATA"),
        (["--samples", "0"], "samples: 0 is below 1"),
        (["--samples", "9999"], "ask for fewer samples"),
        (["--length", "0"], "--length 0 is below 1"),
        (["--length", "300,-1"], "--length -1 is below 1"),
        (["--length", "1k"], "--length 1k is no number"),
        (["--length", ","], "no length is named"),
        (["--length", "300,300"], "length '300' is named twice"),
        (["--protocol", "blind"], "protocol 'blind' is not one of aware, agnostic"),
        (["--depths", "1"], "depths: 1 is below 2"),
        (["--length", str(POSITIONS)], f"{POSITIONS} positions: give a smaller length"),
        (["--batch", "-1"], "batch: -1 is below 1"),
        (["--workers", "0"], "workers: 0 is below 1"),
        (["--baseline", "knorm"], "baseline 'knorm' is not measured"),
        (["--dtype", "int8"], "dtype 'int8' is not one of"),
        (["--model", ""], "the model name is empty"),
        (["--out", ""], "output folder is empty"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str],
    message: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kvfold.evaluation.public_data.find_spec", lambda name: None)
    named = [] if "--model" in arguments else ["--model", model]
    chosen = [] if "--methods" in arguments else ["--methods", "h2o"]
    assert run(["eval", *named, *chosen, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.real
def test_the_default_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--methods", "streaming,random", "--budgets", "0.25", "--samples", "2"]
    assert run(["eval", "--out", str(tmp_path), "--json", "--length", "400", *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    found = {(e["group"], e["method"]): e for e in document["summaries"]}
    assert found["niah", "full"]["score"] == 1
    near, far = (found["prose", name]["kl"]["mean"] for name in ("streaming", "random"))
    assert 0 < near < far
