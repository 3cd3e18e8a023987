"""`kvfold generate`: the streamed answer, the report, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kvfold.cli.app import run
from tests.tiny_folder import POSITIONS, byte_tokenizer, save_tiny

QUICK = ["--max-new-tokens", "12"]
PROMPT = "What is the answer to everything, and why is it so? " * 4


class Input:
    """Standard input with these bytes."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model"))


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert run(["generate", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_answer_on_stdout_and_report_on_stderr(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", PROMPT, "--model", model, *QUICK]) == 0
    out, err = capsys.readouterr()
    document = as_json(capsys, PROMPT, "--model", model, *QUICK)
    assert out == document["text"] + "\n"
    assert err.startswith("full: keeps ")
    assert "tokens/s" in err
    assert err.count("\n") == 1
    assert document["new_tokens"] == 12
    assert document["decode_seconds"] * document["tokens_per_second"] == pytest.approx(11)
    assert document["prompt_tokens"] == len(f"<user>{PROMPT}<assistant>") + 1


def test_a_budget_is_kept(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--method", "streaming", "--budget", "50", "--chunk-size", "32"]
    document = as_json(capsys, PROMPT, "--model", model, *options, *QUICK)
    assert document["cache"]["method"] == "streaming"
    assert document["cache"]["tokens_kept"] == [50, 50, 50]


def test_raw_and_chat(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    raw = as_json(capsys, PROMPT, "--raw", "--model", model, *QUICK)
    chat = as_json(capsys, PROMPT, "--chat", "--model", model, *QUICK)
    assert raw["prompt_tokens"] == len(PROMPT)
    assert chat["prompt_tokens"] > raw["prompt_tokens"]


def test_prompts_from_a_file_and_from_standard_input(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, encoding="utf-8")
    monkeypatch.setattr("sys.stdin", Input(PROMPT.encode()))
    options = ["--model", model, *QUICK]
    texts = [
        as_json(capsys, *prompt, *options)["text"]
        for prompt in ([PROMPT], ["--file", str(path)], ["-"])
    ]
    assert texts[0] == texts[1] == texts[2]


def test_sampling_follows_the_seed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = [PROMPT, "--model", model, "--temperature", "5", *QUICK, "--seed"]
    first, again, other = (as_json(capsys, *options, seed)["text"] for seed in "112")
    assert first == again
    assert first != other


def test_what_sekv_does_is_drawn(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "a.png"
    options = [PROMPT * 2, "--model", model, "--method", "sekv", *QUICK]
    assert run(["generate", *options, "--explain", str(path)]) == 0
    out, err = capsys.readouterr()
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert err.endswith(f"wrote {path}\n")
    assert err.startswith("sekv: keeps ")
    assert "newest, " in err.splitlines()[1]
    path.unlink()
    document = as_json(capsys, *options, "--explain", str(path))
    assert document["explanation"] == str(path)
    assert path.exists()
    assert document["text"] + "\n" == out, "watching changes nothing"
    plain = as_json(capsys, *options)
    assert (plain["text"], plain["explanation"]) == (document["text"], None)
    assert plain["cache"]["details"]["spans"] > 0
    details = [each["cache"]["details"] for each in (plain, document)]
    assert all(sum(each.pop("seconds").values()) > 0 for each in details)
    # Who counts has spans brought by torch, and a kernel may read them where they stand.
    assert all(each.pop("bytes_moved") > 0 for each in details)
    assert details[0] == details[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "the prompt is empty"),
        ([" \n "], "the prompt is empty"),
        ([], "no prompt was given"),
        (["Hi", "--file", "good.txt"], "a prompt and a --file"),
        (["x" * POSITIONS], f"{POSITIONS} positions: shorten the prompt"),
        (["Hi", "--max-new-tokens", str(POSITIONS)], "lower --max-new-tokens"),
        (["Hi", "--method", "snapkv", "--budget", "0"], "budget 0 keeps nothing"),
        (["Hi", "--method", "snapkv", "--budget", "2"], "below the minimum"),
        (["Hi", "--method", "snapkv", "--budget", "-1"], "budget -1 keeps nothing"),
        (["Hi", "--method", "snapkv", "--budget", "abc"], "'abc' is not an amount"),
        (["Hi", "--method", "snapkv", "--budget", "200%"], "more than the whole cache"),
        (["Hi", "--budget", "0.5"], "full keeps everything"),
        (["Hi", "--method", "best"], "unknown method 'best'"),
        (["Hi", "--model", "./nowhere"], "nowhere"),
        (["Hi", "--model", ""], "the model name is empty"),
        (["Hi", "--temperature", "-1"], "temperature -1"),
        (["Hi", "--max-new-tokens", "0"], "--max-new-tokens 0 is below 1"),
        (["Hi", "--chunk-size", "0"], "--chunk-size 0 is below 1"),
        (["Hi", "--explain", "a.png"], "not full: add --method sekv"),
        (["Hi", "--method", "sekv", "--explain", "a.jpg"], "a name that ends in .png"),
        (["Hi", "--method", "sekv", "--explain", "folder.png"], "is a folder"),
        (["Hi", "--method", "sekv", "--explain", "good.txt/a.png"], "cannot write to the folder"),
        (["Hi", "--method", "sekv", "--raw", "--explain", "a.png"], "2 tokens was folded"),
        (["Hi", "--method", "sekv", "--budget", "1.0", "--explain", "a.png"], "keeps no spans"),
        (["--file", "missing.txt"], "missing.txt"),
        (["--file", "latin.txt"], "not UTF-8"),
        (["-"], "not UTF-8"),
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
    monkeypatch.setattr("sys.stdin", Input("café".encode("latin-1")))
    Path("latin.txt").write_bytes("café".encode("latin-1"))
    Path("good.txt").write_text("Some text.", encoding="utf-8")
    Path("folder.png").mkdir()
    named = [] if "--model" in arguments else ["--model", model]
    assert run(["generate", *named, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "folder.png", "good.txt", "latin.txt",
    ]  # fmt: skip


def test_chat_needs_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    byte_tokenizer(template=None).save_pretrained(folder)
    assert run(["generate", "Hi", "--chat", "--model", folder]) == 2
    assert "no chat template" in capsys.readouterr().err
