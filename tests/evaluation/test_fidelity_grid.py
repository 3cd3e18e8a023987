"""Right answers by length, on rows whose numbers are known: cells, tables and pictures."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from kvfold.evaluation.fidelity_export import write_report
from kvfold.evaluation.fidelity_found import Fidelity, Subject
from kvfold.evaluation.fidelity_grid import Cell, grid
from kvfold.evaluation.fidelity_heatmap import draw_heatmap, sets_with_depths
from kvfold.evaluation.fidelity_pages import markdown
from kvfold.evaluation.fidelity_report import Report, report_of, summarize
from kvfold.evaluation.fidelity_rows import Row
from kvfold.evaluation.fidelity_settings import FidelitySettings, MethodSpec
from kvfold.evaluation.fidelity_tables import grids
from kvfold.evaluation.statistics import Share
from tests.evaluation.test_fidelity_report import ROWS as PLAIN
from tests.evaluation.test_fidelity_report import row


def needle(method: str, length: int, index: int, *, right: bool, **options: object) -> Row:
    fast = length if method == "full" else length // 4
    held = {"bytes_fast": fast, "bytes_held": fast if method == "full" else 3 * fast}
    made = row(method, "niah", index, 0.1, length=length, depth=index / 2, is_right=right)
    return replace(made, protocol="agnostic", bytes_full=length, **held, **options)


ROWS = (
    *(needle("full", length, index, right=True) for length in (100, 200) for index in range(2)),
    needle("full", 200, 2, right=False),
    needle("sekv", 100, 0, right=True, found=1.0),
    needle("sekv", 100, 1, right=False, found=0.5),
    *(needle("sekv", 200, index, right=index == 1) for index in range(3)),
)


@pytest.fixture
def report() -> Report:
    settings = FidelitySettings(
        methods=(MethodSpec("sekv", "sekv"),),
        budgets=("0.25",),
        sets=("niah",),
        samples=3,
        lengths=(100, 200),
        depths=3,
        protocol="agnostic",
    )
    subject = Subject("tiny", "f" * 64, "float32", "cpu", {"niah at 100": "a"}, {})
    return report_of(Fidelity("kvfold eval", subject, settings, ROWS))


def find(length: int | None, method: str) -> Cell:
    (found,) = [each for each in grid(ROWS) if (each.length, each.method) == (length, method)]
    return found


def test_cells_count_what_is_right_and_held() -> None:
    assert find(100, "sekv").answers == Share(1, 2)
    assert find(200, "sekv").answers == Share(1, 3)
    assert find(None, "sekv").answers == Share(2, 5)
    assert find(100, "sekv").share_of_full == 0.5
    assert find(200, "sekv").share_of_full == pytest.approx(0.5)
    assert find(None, "sekv").share_of_full == pytest.approx(0.4 / 0.8)
    assert (find(100, "sekv").found, find(200, "sekv").found) == (0.75, None)
    assert (find(None, "sekv").bytes_fast, find(None, "sekv").bytes_slow) == (0.25, 0.5)
    assert (find(200, "full").bytes_fast, find(200, "full").bytes_slow) == (1, 0)


def test_texts_have_no_cells_and_one_length_no_sum() -> None:
    assert {(each.set, each.length) for each in grid(PLAIN)} == {("niah", 0)}


def test_where_the_full_cache_finds_nothing_there_is_no_share_of_it() -> None:
    (full, other) = grid(
        [needle("full", 9, 0, right=False), needle("sekv", 9, 0, right=True)],
    )
    assert (full.share_of_full, other.share_of_full) == (None, None)


def test_lengths_are_groups_and_no_sample_stands_for_another() -> None:
    found = {(each.group, each.method): each for each in summarize(ROWS, seed=0)}
    assert [each for each, method in found if method == "full"] == [
        *("niah", "niah at 100", "niah at 200", "task", "all"),
    ]
    assert found["niah at 200", "sekv"].score == pytest.approx(1 / 3)
    assert found["niah at 200", "sekv"].lost == {"repetitive": 0, "overlength": 0, "wrong": 0}


def test_tables_name_the_protocol_and_the_intervals(report: Report) -> None:
    text = markdown(report)
    for expected in (
        "prompts of up to 100 or 200 tokens, protocol agnostic, 3 samples a set and length",
        "## niah, right answers by length, protocol agnostic",
        "| 100 | sekv | 0.25 | 1 of 2 | 50.0% (9.5% to 90.5%) | 50.0% | 75.0% | 25.0% | 50.0% |",
        "| all | full | 1.0 | 4 of 5 | 80.0% (37.6% to 96.4%) | 100.0% | - | 100.0% | 0.0% |",
    ):
        assert expected in text


def test_plain_evaluations_show_only_shares_that_are_found(report: Report) -> None:
    settings = replace(report.fidelity.settings, lengths=(100,), depths=None, protocol="aware")
    fidelity = replace(report.fidelity, settings=settings)
    (cells,) = grids(replace(report, fidelity=fidelity)).values()
    assert cells == [cell for cell in report.cells if cell.found is not None]
    assert 0 < len(cells) < len(report.cells)
    without = [replace(cell, found=None) for cell in report.cells]
    assert grids(replace(report, fidelity=fidelity, cells=without)) == {}
    assert len(grids(report)) == 1


def test_pictures_show_depth_by_length(report: Report, tmp_path: Path) -> None:
    paths = write_report(report, tmp_path)
    assert [path.name for path in paths] == [
        "eval.json",
        "eval.html",
        "eval.md",
        "eval.png",
        "tradeoff.png",
        "niah.png",
    ]
    document = json.loads(paths[0].read_text(encoding="utf-8"))
    assert document["settings"]["protocol"] == "agnostic"
    assert document["settings"]["lengths"] == [100, 200]
    assert document["rows"][-1]["depth"] == 1
    cell = document["grid"][1]
    assert (cell["method"], cell["length"], cell["answers"]["right"]) == ("sekv", 100, 1)
    assert cell["answers"]["low"] == pytest.approx(0.0945, abs=1e-4)
    assert imread(io.BytesIO(paths[-1].read_bytes())).std() > 0.05


def test_a_picture_differs_where_answers_do() -> None:
    other = [replace(each, is_right=not each.is_right) for each in ROWS]
    assert draw_heatmap(ROWS, "niah", title="a") != draw_heatmap(other, "niah", title="a")
    assert sets_with_depths(ROWS) == ["niah"]
    assert sets_with_depths(PLAIN) == []
