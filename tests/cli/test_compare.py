"""`kvfold compare`: the table, the files, and what it refuses before it starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from matplotlib.image import imread

import kvfold
from kvfold.budget import Budget
from kvfold.cli.app import run
from kvfold.evaluation.settings import DEFAULT_METHODS, default_methods
from tests.tiny_folder import POSITIONS, save_tiny

QUICK = ["--methods", "streaming,tova", "--max-new-tokens", "4", "--length", "300"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def test_table_and_files(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    os.environ["COLUMNS"] = "100"
    try:
        code = run(["compare", "--model", model, "--out", str(out), *QUICK])
    finally:
        del os.environ["COLUMNS"]
    shown, said = capsys.readouterr()
    assert code == 0
    assert max(map(len, shown.splitlines())) <= 100
    for expected in ("full", "streaming", "tova", "TTFT", "x full", "KL text", "question:"):
        assert expected in shown
    assert "…" not in shown
    assert said.startswith("  0% full: reading the prompt\n")
    assert "compare.json" in said
    assert "compare.png" in said
    document = json.loads((out / "compare.json").read_text(encoding="utf-8"))
    command = document["command"]
    assert command.startswith("kvfold compare --methods streaming,tova --max-new-tokens 4")
    assert f"--model {model} --length 300 --seed 0" in command
    assert imread(out / "compare.png").ndim == 3


def test_two_tiers_are_told(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--methods", "sekv,tova", "--max-new-tokens", "4", "--length", "300"]
    assert run(["compare", "--model", model, "--out", str(tmp_path), *options]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (shown.count(" spans of "), shown.count(" moved; ")) == (1, 1)
    full, sekv, tova = json.loads((tmp_path / "compare.json").read_text())["results"]
    assert sekv["after_answer"]["bytes_moved"] > sekv["report"]["details"]["bytes_moved"] == 0
    assert (full["after_answer"], tova["after_answer"]) == (None, None)


def test_json_is_the_only_thing_on_stdout(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Bread is baked at dawn. " * 20, encoding="utf-8")
    arguments = ["compare", "--model", model, "--out", str(tmp_path), "--document", str(text)]
    arguments += ["--question", "When?", "--methods", "knorm", "--max-new-tokens", "3"]
    arguments += ["--budget", "64", "--compress-before-question", "--json"]
    assert run(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["settings"]["protocol"] == "query-agnostic"
    assert document["subject"]["document"]["expected"] is None
    full, knorm = document["results"]
    assert full["is_right"] is None
    assert full["on_continuation"]["kl"]["mean"] == 0
    assert knorm["report"]["tokens_kept"] == [64, 64, 64]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", "0"], "budget 0 keeps nothing"),
        (["--budget", "2"], "below the minimum"),
        (["--budget", "-1"], "budget -1 keeps nothing"),
        (["--budget", "abc"], "'abc' is not an amount"),
        (["--budget", "200%"], "more than the whole cache"),
        (["--methods", "full,best"], "unknown method 'best'"),
        (["--methods", ","], "no method is named"),
        (["--max-new-tokens", "0"], "below 1"),
        (["--chunk-size", "0"], "below 1"),
        (["--question", " "], "the question is empty"),
        (["--document", "missing.txt", "--question", "What?"], "missing.txt"),
        (["--document", "latin.txt", "--question", "What?"], "not UTF-8"),
        (["--document", "empty.txt", "--question", "What?"], "is empty"),
        (["--document", "good.txt"], "needs a question"),
        (["--document", "good.txt", "--question", "?", "--length", "9"], "leave it out"),
        (["--out", "good.txt"], "choose another"),
        (["--out", ""], "output folder is empty"),
        (["--model", ""], "the model name is empty"),
        (["--dtype", "int8"], "dtype 'int8' is not one of"),
        (["--length", "0"], "--length 0 is below 1"),
        (["--out", "good.txt/deeper"], "choose another"),
        (["--model", "./nowhere"], "nowhere"),
        (["--length", "10"], "at least 256"),
        (["--length", str(POSITIONS)], f"{POSITIONS} positions: give a shorter document"),
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
    Path("latin.txt").write_bytes("café".encode("latin-1"))
    Path("empty.txt").write_text(" \n", encoding="utf-8")
    Path("good.txt").write_text("Some text.", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    named = [] if "--model" in arguments else ["--model", model]
    assert run(["compare", *named, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


def test_every_method_but_the_floor_is_compared_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(DEFAULT_METHODS) == set(kvfold.methods()) - {"random"}
    assert DEFAULT_METHODS[:2] == ("full", "distill")
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["compare", "--help"]) == 0
    assert f"default: ({', '.join(DEFAULT_METHODS)})" in capsys.readouterr().out


@pytest.mark.parametrize("budget", ["64", "1MiB", "4%"])
def test_a_method_that_cannot_keep_to_the_budget_is_left_out(budget: str) -> None:
    assert set(DEFAULT_METHODS) - set(default_methods(budget)) == {"sekv"}
    assert default_methods("25%") == DEFAULT_METHODS


def test_interrupted_leaves_nothing(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvfold.evaluation.comparison.decode_rates", interrupt)
    out = tmp_path / "out"
    assert run(["compare", "--model", model, "--out", str(out), *QUICK]) == 130
    assert capsys.readouterr().out == ""
    assert not out.exists()


@pytest.mark.real
def test_the_default_model_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--methods", "full,snapkv", "--length", "600", "--max-new-tokens", "20"]
    assert run(["compare", "--out", str(tmp_path), "--json", *arguments]) == 0
    document = json.loads(capsys.readouterr().out)
    full, snapkv = document["results"]
    assert document["subject"]["document"]["expected"] in full["answer"]
    assert full["is_right"] is True
    assert full["on_answer"]["kl"]["mean"] == full["on_continuation"]["kl"]["mean"] == 0
    assert 0 < snapkv["on_continuation"]["kl"]["mean"] < 5
    allowed = Budget.parse("0.25").tokens(document["subject"]["prompt_tokens"])
    assert snapkv["report"]["tokens_kept"] == [allowed] * 30
    assert 0.24 < snapkv["share_of_full"] < 0.26
    assert json.loads((tmp_path / "compare.json").read_text(encoding="utf-8")) == document
    assert imread(tmp_path / "compare.png").std() > 0.1
