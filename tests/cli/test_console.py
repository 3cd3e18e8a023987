"""Tables, JSON and numbers as commands print them."""

from __future__ import annotations

import io
import json
import logging

import pytest
from rich.console import Console

from kvfold.cli.console import (
    facts,
    now_and_then,
    print_json,
    progress,
    quiet_libraries,
    stdout,
    table,
)


def rendered(renderable: object) -> list[str]:
    console = Console(width=60, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text().splitlines()


def test_json_is_one_strict_document(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("-inf"), 1.5], "c": ("é", None, True)})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": None, "b": [None, 1.5], "c": ["é", None, True]}
    assert err == ""


def test_numbers_stand_right_and_markup_is_not_read() -> None:
    lines = rendered(table(("answer", "kept"), [("[bold]x[/bold]", "7 MiB"), ("y", None)]))
    assert any("[bold]x[/bold]" in line for line in lines)
    assert any(line.rstrip(" │").endswith(" -") for line in lines if "y" in line)
    assert any("│ 7 MiB │" in line for line in lines)


def test_facts_show_a_dash_for_nothing() -> None:
    lines = rendered(facts({"commit": None, "cores": 2}, title="Here"))
    assert lines[0].startswith("Here")
    assert [line.split("│")[1:3] for line in lines if "│" in line] == [
        [" commit ", " - "],
        [" cores  ", " 2 "],
    ]


def test_output_without_a_terminal_is_wide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    stdout().print("x" * 150)
    assert capsys.readouterr().out == "x" * 150 + "\n"


def test_warnings_of_kvfold_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("kvfold")
    before = (logger.handlers, logger.level)
    try:
        quiet_libraries(debug=False)
        logging.getLogger("kvfold.cache").warning("look")
        logging.getLogger("kvfold.cache").info("unseen")
        assert capsys.readouterr() == ("", "kvfold: WARNING: look\n")
    finally:
        logger.handlers, level = before
        logger.setLevel(level)


def test_lines_of_progress_come_now_and_then() -> None:
    said: list[str] = []
    now = 0.0
    offer = now_and_then(said.append, seconds=5, clock=lambda: now)
    for now in (0.0, 4.9, 5.0, 5.1, 9.9, 10.0, 31.0, 32.0):
        offer(f"{now:g}")
    assert said == ["0", "5", "10", "31"]


def test_progress_without_a_terminal_begins_with_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress() as report:
        report("reading", 0.0)
        report("reading", 0.5)
    assert capsys.readouterr() == ("", "  0% reading\n")
