"""The record in `results/` is true: whole, told by the README as it is, and made again alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.results import END, LONG, QUICK, ROOT, keep, read, table, with_table
from kvfold.evaluation.fidelity import evaluate
from kvfold.evaluation.fidelity_export import write_report
from kvfold.evaluation.fidelity_rows import Row
from kvfold.evaluation.fidelity_settings import FidelitySettings, MethodSpec
from tests.evaluation.test_fidelity_costs import report
from tests.evaluation.test_fidelity_report import ROWS

README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORDS = sorted(path.parent for path in (ROOT / "results").glob("*/eval.json"))
MOST_BYTES = 3_000_000

ABSOLUTE, RELATIVE = 0.02, 0.25
"""By how much a sample's KL may be off the recorded one, in nats and as a share of it: rounding,
which differs between processors and thread counts, now and then evicts another token."""
TURNED = 1
"""So many answers of a method, budget and set may turn wrong by that; none of the full cache's."""


def departures(recorded: Iterable[Mapping[str, Any]], fresh: Sequence[Row]) -> Iterator[str]:
    """How fresh rows are off a record; other samples than the recorded ones, by answers alone."""
    known = {(r["method"], r["budget"], r["set"], r["index"]): r for r in recorded}
    lost: dict[str, int] = {}
    for row in fresh:
        old = known[row.method, row.budget, row.set, row.index]
        name = f"{row.method} at {row.budget} on {row.set}"
        if row.key == old["key"] and row.kl is not None:
            off = abs(row.kl - old["kl"])
            if off > ABSOLUTE + RELATIVE * old["kl"]:
                yield f"{name} {row.index}: KL {row.kl:.4f}, recorded {old['kl']:.4f}"
        lost[name] = lost.get(name, 0) + bool(old["is_right"] and not row.is_right)
    for name, count in lost.items():
        if count > (0 if name.startswith("full ") else TURNED):
            yield f"{name}: {count} answers that were right are wrong"


def test_departures_are_named_and_rounding_is_not() -> None:
    recorded = [each.to_dict() for each in ROWS]
    assert list(departures(recorded, ROWS)) == []
    near, far = (replace(each, divergences=[0.21 + 0.06 * each.index]) for each in ROWS[12:14])
    assert list(departures(recorded, [near])) == []
    assert list(departures(recorded, [replace(far, divergences=[0.6])])) == [
        "distill at 0.25 on niah 1: KL 0.6000, recorded 0.4000"
    ]
    assert list(departures(recorded, [replace(far, key="another", divergences=[0.6])])) == []
    wrong = [replace(each, is_right=False) for each in ROWS if each.set == "niah"]
    assert list(departures(recorded, wrong)) == [
        "full at 1.0 on niah: 3 answers that were right are wrong",
        "h2o at 0.25 on niah: 4 answers that were right are wrong",
    ]


# What stands there --------------------------------------------------------------------------------


def test_records_are_small_and_from_a_commit() -> None:
    assert QUICK in RECORDS
    files = [path for path in (ROOT / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    for record in RECORDS:
        numbers, rows = read(record)
        assert "-dirty" not in numbers["environment"]["commit"]
        assert numbers["environment"]["torch"]
        assert f"--seed {numbers['settings']['seed']}" in numbers["command"]
        assert not set(LONG) & set(rows[0])


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)
def test_means_are_those_of_the_rows(record: Path) -> None:
    numbers, rows = read(record)
    for each in numbers["summaries"]:
        if each["group"] not in numbers["settings"]["sets"]:
            continue
        run = (each["group"], each["method"], each["budget"])
        own = [row for row in rows if (row["set"], row["method"], row["budget"]) == run]
        assert len(own) == each["samples"]
        distances = [row["kl"] for row in own if row["kl"] is not None]
        assert each["kl"]["mean"] == pytest.approx(fmean(distances), abs=1e-9)
        if each["score"] is not None:
            assert each["score"] == pytest.approx(fmean(row["is_right"] for row in own))


def test_the_readme_has_the_table_of_the_record() -> None:
    assert with_table(README, read(QUICK)[0]) == README


def test_another_figure_is_another_table() -> None:
    numbers, _ = read(QUICK)
    before = table(numbers)
    (cell, *_) = (each for each in numbers["grid"] if each["method"] == "distill")
    cell["answers"]["right"] -= 1
    assert table(numbers) != before
    with pytest.raises(ValueError, match="the marks"):
        with_table(README.replace(END, ""), numbers)


def test_what_is_kept_is_short_and_replaces_what_was_there(tmp_path: Path) -> None:
    evaluation, record = tmp_path / "evaluation", tmp_path / "record"
    write_report(report(ROWS), evaluation)
    record.mkdir()
    (record / "old.png").write_bytes(b"")
    keep(evaluation, record)
    names = sorted(path.name for path in record.iterdir())
    assert names == ["eval.json", "eval.md", "eval.png", "results.jsonl", "tradeoff.png"]
    numbers, rows = read(record)
    assert "rows" not in numbers
    assert [row["kl"] for row in rows] == [each.kl for each in ROWS]
    assert not set(LONG) & set(rows[0])


# What is made again -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh(
    default_model: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Row]:
    """A few samples of the quick record, evaluated again."""
    numbers, _ = read(QUICK)
    methods = tuple(map(MethodSpec.parse, ("streaming", "snapkv", "distill", "sekv")))
    settings = FidelitySettings(
        methods=methods,
        budgets=("0.25",),
        sets=("niah",),
        samples=2,
        lengths=tuple(numbers["settings"]["lengths"]),
        seed=numbers["settings"]["seed"],
    )
    found: list[Row] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("KVFOLD_DATA", raising=False)
        others = replace(settings, methods=methods[2:], sets=("prose", "arithmetic"), samples=1)
        for wanted in (settings, others):
            folder = tmp_path_factory.mktemp("fresh")
            result = evaluate(*default_model, wanted, folder=folder)
            told = (numbers["subject"]["fingerprint"], numbers["subject"]["policies"])
            new = (result.subject.fingerprint, result.subject.policies)
            assert new[0] == told[0], "another model: make results-quick anew"
            assert new[1].items() <= told[1].items(), "another policy: make results-quick anew"
            found += result.rows
    return found


@pytest.mark.real
def test_a_fresh_run_finds_what_the_record_says(fresh: list[Row]) -> None:
    _, recorded = read(QUICK)
    keys = {row["key"] for row in recorded}
    assert all(row.key in keys for row in fresh if row.set == "arithmetic")
    assert list(departures(recorded, fresh)) == []


@pytest.mark.real
def test_a_cache_that_drops_the_needle_is_found_out(fresh: list[Row]) -> None:
    _, recorded = read(QUICK)
    dropped = [
        replace(row, method="distill")
        for row in fresh
        if (row.method, row.set) == ("streaming", "niah")
    ]
    assert "distill at 0.25 on niah: 2 answers that were right are wrong" in list(
        departures(recorded, dropped)
    )
