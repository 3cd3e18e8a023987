"""`kvfold transfer serve` and `ask`: two processes, with codes and without, and what is refused."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfold.cli.app import run
from tests.cli.transfer_pair import calibrated, save_pair, write_text
from tests.processes import environment

SECRET = "0123456789abcdef-secret"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a pair, its codec, a prefix and a key."""
    folder = tmp_path_factory.mktemp("service")
    pair = save_pair(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_text(Path("text.txt"))
        Path("prefix.txt").write_text("The letter was read twice. " * 4, encoding="utf-8")
        Path("key").write_text(SECRET + "\n", encoding="utf-8")
        Path("short").write_text("abc", encoding="utf-8")
        assert calibrated(pair, "codec", "--payload", "0.6", "--patches", "0") == 0
        yield folder


def ask(*arguments: str, codec: str = "codec") -> int:
    given = ["--prefix", "prefix.txt", "--model", "special", "--max-new-tokens", "8"]
    return run(["transfer", "ask", codec, "When?", *given, *arguments])


@pytest.fixture
def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def test_a_prefix_comes_by_code_and_the_end_tells_what_was_done(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "kvfold", "transfer", "serve", "codec", "--model", "base"]
    command += ["--port", "0", "--key-file", "key", "--keep", "1MiB", "--json"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=place,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith("serving at 127.0.0.1:")
        port = line.split(":")[1].partition(";")[0]
        assert ask("--port", port, "--key-file", "key", "--rounds", "2", "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert document["counts"]["received"] == 3
        assert document["bytes_received"] == document["counts"]["bytes_received"] / 3 > 1000
        assert [each["own_seconds"] > 0 for each in document["rounds"]] == [True, True]
        for first in (document, *(each["codes"] for each in document["rounds"])):
            assert (first["source"], first["reason"]) == ("producer", None)
            assert first["bytes_received"] == document["bytes_received"]
            stages = first["stages"]
            assert (stages["read"], min(stages["connect"], stages["decode"]) > 0) == (0, True)
            prefix = sum(stages.values()) - stages["first_token"]
            assert prefix <= first["prefix_seconds"] < first["first_token_seconds"]
            assert sum(stages.values()) <= first["first_token_seconds"]
        assert document["cache"]["tokens_seen"] == (
            document["prefix_tokens"] + document["prompt_tokens"] + document["new_tokens"] - 1
        )
        assert SECRET not in json.dumps(document)
        smaller = ("--method", "snapkv", "--budget", "24", "--rounds", "1")
        assert ask("--port", port, "--key-file", "key", *smaller) == 0
        out, err = capsys.readouterr()
        assert out.endswith("\n")
        assert "from the producer's codes" in err
        assert "snapkv" in err
        assert "; then after 0." in err
        assert ", and by itself after 0." in err
        assert ask("--port", port, "--json") == 0
        refused = json.loads(capsys.readouterr().out)
        assert refused["source"] == "own"
        assert "the shared key" in refused["reason"]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    counts = json.loads(out)
    assert (counts["served"], counts["encoded"], counts["refused"]) == (5, 1, 1)
    assert counts["kept"] == 1
    assert 5 * counts["bytes_kept"] == counts["bytes_sent"]
    assert SECRET not in out + err


def test_without_a_producer_the_answer_is_the_consumers_own(
    place: Path, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("--port", str(free_port), "--raw") == 0
    out, err = capsys.readouterr()
    assert "read by the consumer itself:" in err
    text = Path("prefix.txt").read_text(encoding="utf-8") + "When?"
    assert run(["generate", text, "--raw", "--model", "special", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "0"], "--port 0 is no port: give 1 to 65535"),
        (["--key-file", "none"], "cannot read the key file 'none'"),
        (["--key-file", "short"], "the key in 'short' has 3 bytes: make one of at least 16"),
        (["--tls-authority", "text.txt"], "cannot use 'text.txt' as certificates to trust"),
        (["--answer-seconds", "0"], "--answer-seconds 0 is no time"),
        (["--prefix", "none"], "cannot read 'none'"),
        (["--method", "nothing"], "nothing"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 is below 1"),
        (["--rounds", "-1"], "--rounds -1 is below 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_questions_are_refused_before_the_model_is_loaded(
    place: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvfold.cli.transfer_ask.load", load)
    assert ask(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


def test_other_models_and_codecs_are_refused(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("--model", "base") == 2
    assert "this model is not the codec's consumer" in capsys.readouterr().err
    assert ask(codec="nothing") == 2
    assert "there is no codec at nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "serving at 0.0.0.0 reaches other machines"),
        (["--port", "70000"], "--port 70000 is no port: give 0 to 65535"),
        (["--ttl", "nan"], "--ttl nan is no time"),
        (["--keep", "0.5"], "--keep '0.5' is no number of bytes"),
        (["--clients", "0"], "--clients 0 is below 1"),
        (["--tls-key", "key"], "give --tls-certificate and --tls-key"),
        (["--tls-key", "key", "--tls-certificate", "key"], "cannot use the certificate 'key'"),
        (["--key-file", "short"], "has 3 bytes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_services_are_refused_before_the_model_is_loaded(
    place: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvfold.cli.transfer_serve.load", load)
    assert run(["transfer", "serve", "codec", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
