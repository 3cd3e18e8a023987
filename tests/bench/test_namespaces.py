"""The handover over a link of two namespaces: what it measures, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bench.link import LEAST_BURST, Link, LinkError, joined
from bench.namespaces import NAME, STAGES, _asked, main
from kvfold.errors import ConfigError
from tests.cli.transfer_pair import calibrated, save_pair, write_text
from tests.processes import SOURCE, environment

RATE = 2e6


@pytest.fixture(scope="module")
def permitted() -> None:
    """Skips where namespaces cannot be made, or nothing can hold a link to a rate."""
    try:
        with joined() as link:
            link.limit(RATE)
    except LinkError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a tiny pair and its codec."""
    folder = tmp_path_factory.mktemp("pair")
    base, special = save_pair(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_text(Path("text.txt"))
        assert calibrated((base, special), "codec", "--payload", "0.6", "--patches", "0") == 0
    return ["--producer", base, "--consumer", special, "--codec", str(folder / "codec")]


def namespaces() -> set[str]:
    """Those there are that are ours."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines() if line.startswith("kvfold-")}


def test_a_link_carries_its_rate_and_is_gone_afterwards(permitted: None) -> None:
    with pytest.raises(ZeroDivisionError), joined() as link:
        assert {link.first, link.second} <= namespaces()
        for rate in (20e6, 100e6):
            link.limit(rate)
            assert 0.4 * rate < link.carried(rate) < 1.1 * rate
        raise ZeroDivisionError
    assert not {link.first, link.second} & namespaces()


def test_codes_travel_between_namespaces(
    permitted: None, pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    given = ["--tokens", "900", "--rounds", "1", "--rates", "2", "--out", str(tmp_path)]
    assert main([*pair, *given]) == 0
    assert list(work.iterdir()) == []
    assert not [name for name in namespaces() if name.split("-")[1] == str(os.getpid())]
    result = json.loads((tmp_path / NAME).read_text())
    assert result["command"].startswith("python -m bench.namespaces --producer")
    assert result["command"].endswith("--tokens 900 --rounds 1 --rates 2")
    assert result["environment"]["torch"]
    served, (sample,), (row,) = (result[name] for name in ("served", "samples", "rates"))
    assert (served["encoded"], served["served"], served["refused"]) == (1, 2, 0)
    assert (sample["rate"], sample["prefix_tokens"]) == (RATE, 900)
    assert row["bytes"]["median"] == served["bytes_sent"] / 2
    stages = {stage: row[stage]["median"] for stage in STAGES}
    assert min(stages.values()) > 0
    assert 0.5 * row["codes"]["median"] < sum(stages.values()) <= row["codes"]["median"]
    assert row["sooner"]["median"] == row["own"]["median"] / row["codes"]["median"]
    # Of the bytes all but the burst were held back.
    held = 8 * (row["bytes"]["median"] - LEAST_BURST) / RATE
    assert held > 0.1
    assert stages["wait"] + stages["receive"] + stages["decode"] > held


def test_nothing_is_left_when_it_is_ended(permitted: None, pair: list[str], tmp_path: Path) -> None:
    (tmp_path / "prefix.txt").write_text("The letter was read twice.", encoding="utf-8")
    given = ["--prefix", str(tmp_path / "prefix.txt"), "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.namespaces", *pair, *given],
        stderr=subprocess.DEVNULL,
        env=environment(TMPDIR=str(tmp_path)),
        cwd=SOURCE.parent,
    )
    link = Link(*(f"kvfold-{process.pid}-{end}" for end in ("first", "second")))
    try:
        inside = until(lambda: link.first in namespaces() and pids(link.first))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert not {link.first, link.second} & namespaces()
    assert not any(Path("/proc", pid).exists() for pid in inside)
    assert [path.name for path in tmp_path.iterdir()] == ["prefix.txt"]


def pids(namespace: str) -> list[str]:
    """Of the processes in a namespace."""
    command = ["ip", "netns", "pids", namespace]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


def until(found: Callable[[], list[str] | bool]) -> list[str]:
    """What is found once it is there."""
    for _ in range(600):
        if isinstance(there := found(), list) and there:
            return there
        time.sleep(0.1)
    raise AssertionError("it did not come")


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Has the bench measure without a link or processes; the rates in their order.

    Codes take 1, 2, 3 s and the consumer alone 3 s.
    """
    rates: list[float] = []

    def asked(*_: object) -> dict[str, Any]:
        seconds = float(len(rates))
        stages = dict.fromkeys(STAGES, seconds / 5)
        codes = {"first_token_seconds": seconds, "stages": stages, "bytes_received": 2**20}
        told = {"source": "producer", "reason": None, "prefix_tokens": 8, "prompt_tokens": 2}
        rounds = [{"codes": codes, "own_seconds": 3.0}]
        return {**told, "rounds": rounds, "environment": {"device": "none"}}

    class Still:
        limit = staticmethod(rates.append)
        carried = staticmethod(lambda rate: rate / 2)

    class Served:
        terminate = staticmethod(lambda: None)
        communicate = staticmethod(lambda timeout: ('{"encoded": 1}', ""))

    monkeypatch.setattr("bench.namespaces.joined", lambda: nullcontext(Still()))
    monkeypatch.setattr("bench.namespaces._serving", lambda *_: nullcontext(Served()))
    monkeypatch.setattr("bench.namespaces._asked", asked)
    return rates


def test_rates_take_turns_and_spreads_are_told(
    turns: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    given = ["--prefix", "prefix.txt", "--rates", "10,1000", "--rounds", "2"]
    assert main([*given, "--out", str(tmp_path)]) == 0
    assert turns == [1e7, 1e9, 1e7, 1e9]
    result = json.loads((tmp_path / NAME).read_text())
    slow, fast = result["rates"]
    assert (slow["rate"], slow["codes"]["samples"], slow["own"]["median"]) == (1e7, [1, 3], 3)
    assert (slow["sooner"]["samples"], slow["carried"]["median"]) == ([3, 1], 5e6)
    assert (fast["codes"]["samples"], fast["sooner"]["median"]) == ([2, 4], (1.5 + 0.75) / 2)
    assert (result["served"], result["environment"]) == ({"encoded": 1}, {"device": "none"})
    out = capsys.readouterr().out
    assert "prefix of 8 tokens, prompt of 2" in out
    assert "2000 (1000 to 3000)" in out
    assert "1.12 (0.75 to 1.50)" in out


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"source": "own", "reason": "nobody there"}, "read the prefix itself: nobody there"),
        ({"source": "producer", "reason": None}, "read the prefix itself: too late"),
        (None, "asking failed: kvfold: no"),
    ],
)
def test_an_answer_without_codes_is_no_measurement(
    told: dict[str, Any] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = {"rounds": [{"codes": {"source": "own", "reason": "too late"}}]}
    out = "" if told is None else json.dumps({**told, **late})
    done = subprocess.CompletedProcess([], int(told is None), out, "a warning\nkvfold: no\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: done)
    options = Namespace(codec="shipped", consumer="specialist", prompt="When?")
    with pytest.raises(ConfigError, match=message):
        _asked(Link("first", "second"), options, Path("key"), Path("prefix.txt"))


@pytest.mark.parametrize(
    ("what", "value", "message"),
    [
        ("sys.platform", "darwin", "Linux's, and this is darwin: use Linux"),
        ("os.geteuid", lambda: 1000, "by root alone: run this with sudo"),
        ("shutil.which", lambda name: None, "there is no program 'ip' here: install iproute2"),
        ("subprocess.run", lambda *a, **o: failed(), "failed (Operation not permitted): use a"),
    ],
)
def test_where_it_is_not_permitted_one_sentence_says_so(
    what: str,
    value: object,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr(what, value)
    assert main(["--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert list(tmp_path.iterdir()) == []


def failed() -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 1, "", "mount failed:\nOperation not permitted\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "0"], "'0' are no Mbit/s above 0"),
        (["--rates", "fast"], "'fast' are no Mbit/s"),
        (["--rounds", "0"], "'0' is no number above 0"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_producer_that_does_not_start_is_told_of(
    permitted: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    (tmp_path / "prefix.txt").write_text("The letter.", encoding="utf-8")
    given = ["--prefix", str(tmp_path / "prefix.txt"), "--out", str(tmp_path)]
    assert main(["--producer", "", *given]) == 2
    assert "the producer did not start: " in (err := capsys.readouterr().err)
    assert "the model name is empty" in err
    assert err.count("\n") == 1
