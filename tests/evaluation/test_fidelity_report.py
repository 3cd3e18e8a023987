"""Statistics of an evaluation, on rows whose numbers are known."""

from __future__ import annotations

import io
import json
import math
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imread

from kvfold.evaluation.fidelity_export import write_report
from kvfold.evaluation.fidelity_found import Fidelity, Subject
from kvfold.evaluation.fidelity_pages import html, markdown
from kvfold.evaluation.fidelity_report import (
    Report,
    Summary,
    differences,
    report_of,
    summarize,
)
from kvfold.evaluation.fidelity_rows import Row
from kvfold.evaluation.fidelity_settings import FidelitySettings, MethodSpec
from kvfold.evaluation.fidelity_tables import parts


def row(method: str, name: str, index: int, kl: float | None, **options: object) -> Row:
    task = name != "prose"
    values: dict[str, object] = {
        "key": f"{method} {name} {index}",
        "set": name,
        "kind": "task" if task else "text",
        "index": index,
        "method": method,
        "budget": "1.0" if method == "full" else "0.25",
        "prompt_tokens": 100,
        "divergences": [] if kl is None else [kl / 2, kl * 3 / 2],
        "agreements": [] if kl is None else [True, index % 2 == 0],
        "answer": "one" if task else None,
        "answer_tokens": 4 if task else None,
        "is_right": True if task else None,
        "fault": None,
        "tokens_kept": 100 if method == "full" else 25,
        "bytes_held": 1000 if method == "full" else 300,
        "bytes_full": 1000,
        "bytes_fast": 1000 if method == "full" else 300,
    }
    return Row(**{**values, **options})  # pyright: ignore[reportArgumentType]


WRONG = {"is_right": False, "fault": "wrong"}
LOOP = {"is_right": False, "fault": "repetitive", "answer_tokens": 10}
ROWS = (
    *(row("full", "prose", index, 0.0) for index in range(4)),
    *(row("full", "niah", index, 0.0) for index in range(3)),
    row("full", "niah", 3, None, **WRONG, answer_tokens=0),
    *(row("distill", "prose", index, 0.1 * index) for index in range(4)),
    row("distill", "niah", 0, 0.2),
    row("distill", "niah", 1, 0.4, **WRONG),
    row("distill", "niah", 2, 0.6, **LOOP),
    row("distill", "niah", 3, None, **WRONG),
    *(row("h2o", "prose", index, 0.1 * index + 0.5) for index in range(4)),
    *(row("h2o", "niah", index, 0.1 * (index + 1) * (-1) ** index + 0.5) for index in range(3)),
    row("h2o", "niah", 3, None),
)


@pytest.fixture
def report() -> Report:
    settings = FidelitySettings(
        methods=tuple(map(MethodSpec.parse, ("h2o", "distill"))),
        budgets=("0.25",),
        sets=("prose", "niah"),
        samples=4,
    )
    subject = Subject("tiny", "f" * 64, "float32", "cpu", {"prose": "a", "niah": "b"}, {})
    return report_of(Fidelity("kvfold eval", subject, settings, ROWS))


def find(group: str, method: str) -> Summary:
    (found,) = [e for e in summarize(ROWS, seed=0) if (e.group, e.method) == (group, method)]
    return found


def test_means_over_a_set() -> None:
    text = find("prose", "distill")
    assert text.kl is not None
    assert text.kl.mean == pytest.approx(0.15)
    assert 0 <= text.kl.low < 0.15 < text.kl.high <= 0.3
    assert (text.kl.count, text.samples, text.agreement) == (4, 4, 0.75)
    assert (text.score, text.faults, text.lost, text.answer_length) == (None,) * 4
    assert (text.tokens_kept, text.bytes_share) == (25, 0.3)


def test_perplexity_is_that_of_texts_that_have_one() -> None:
    known = [replace(each, nll=math.log(2 + each.index)) for each in ROWS if each.kind == "text"]
    tasks = [each for each in ROWS if each.kind == "task"]
    found = {(e.group, e.method): e.perplexity for e in summarize([*known, *tasks], seed=0)}
    perplexity = found["prose", "h2o"]
    assert perplexity is not None
    assert (perplexity.mean, perplexity.count) == (pytest.approx(120**0.25), 4)
    assert 2 <= perplexity.low < perplexity.mean < perplexity.high <= 5
    assert (found["all", "h2o"], found["niah", "h2o"]) == (perplexity, None)
    assert find("prose", "h2o").perplexity is None
    (row_, *others) = known
    partly = summarize([replace(row_, nll=None), *others], seed=0)
    assert next(e for e in partly if e.method == row_.method).perplexity is None


def test_scores_and_faults_of_tasks() -> None:
    full, task = find("niah", "full"), find("niah", "distill")
    assert (full.score, full.share_of_full, full.lost) == (
        0.75,
        1.0,
        {"repetitive": 0, "overlength": 0, "wrong": 0},
    )
    assert task.score == 0.25
    assert task.share_of_full == pytest.approx(1 / 3)
    assert task.faults == {"repetitive": 0.25, "overlength": 0, "wrong": 0.5}
    third = pytest.approx(1 / 3)
    assert task.lost == {"repetitive": third, "overlength": 0, "wrong": third}
    assert task.answer_length == pytest.approx(22 / 12)
    assert task.kl is not None
    assert (task.kl.mean, task.kl.count, task.samples) == (pytest.approx(0.4), 3, 4)


def test_groups_are_sets_kinds_and_all() -> None:
    found = summarize(ROWS, seed=0)
    groups = list(dict.fromkeys(each.group for each in found))
    assert groups == ["prose", "niah", "text", "task", "all"]
    assert find("text", "h2o").kl == find("prose", "h2o").kl
    every = find("all", "distill").kl
    assert every is not None
    assert every.mean == pytest.approx((0.6 + 1.2) / 7)


def test_differences_are_paired() -> None:
    found = {(each.group, each.other): each for each in differences(ROWS, "distill", seed=0)}
    text = found["prose", "h2o"]
    assert (text.kl.mean, text.kl.low, text.kl.high) == pytest.approx((-0.5, -0.5, -0.5))
    assert (text.verdict, text.kl.count) == ("nearer to full", 4)
    task = found["niah", "h2o"]
    assert task.kl.count == 3
    assert task.kl.mean == pytest.approx((0.2 - 0.6 + 0.4 - 0.3 + 0.6 - 0.8) / 3)
    assert (task.kl.low, task.kl.high) == pytest.approx((-0.4, 0.1))
    assert task.verdict == "no clear difference"
    turned = {(e.group, e.other): e for e in differences(ROWS, "h2o", seed=0)}
    assert turned["prose", "distill"].verdict == "further from full"
    assert ("prose", "full") not in found
    alone = [row("h2o", "prose", 0, 0.5), row("distill", "prose", 0, 0.1)]
    assert {each.verdict for each in differences(alone, "h2o", seed=0)} == {"one sample alone"}


def test_markdown_has_every_group_and_difference(report: Report) -> None:
    text = markdown(report)
    for expected in (
        "## prose: 4 samples",
        "## niah: 4 samples",
        "## all: 8 samples",
        "| distill | 0.25 | 0.1500 (",
        "| full | 1.0 | 0.0000 (0.0000 to 0.0000) | 83.3% | - | 75.0% | 100.0% |",
        "| prose | 0.25 | distill | h2o | -0.5000 (-0.5000 to -0.5000) | nearer to full |",
        "```\nkvfold eval\n```",
    ):
        assert expected in text


class Reader(HTMLParser):
    """What a browser makes of a page: rows of cells, pictures, and whether all is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.pictures: dict[str, bytes] = {}
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        if tag == "img":
            kind, _, data = str(facts["src"]).partition(",")
            assert kind == "data:image/png;base64"
            self.pictures[str(facts["alt"])] = b64decode(data, validate=True)
        elif tag != "meta":
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] in (["td"], ["th"]):
            self.rows[-1].append(data)


def test_the_page_has_all_tables_and_pictures(report: Report) -> None:
    pictures = {"eval.png": b"\x89PNG", "a<b&.png": b"\x00"}
    page = Reader(html(report, pictures))
    assert page.pictures == pictures
    tables = [part.table for part in parts(report) if part.table is not None]
    expected = [row for table in tables for row in (table.columns, *table.rows)]
    assert page.rows == [["-" if cell is None else cell for cell in row] for row in expected]


def test_names_cannot_write_into_the_page(report: Report) -> None:
    subject = replace(report.fidelity.subject, model="<script>alert(1)</script>")
    hostile = replace(report, fidelity=replace(report.fidelity, subject=subject))
    assert "<script" not in html(hostile, {})


def test_files_say_what_was_found(report: Report, tmp_path: Path) -> None:
    numbers, page, tables, chart, tradeoff = write_report(report, tmp_path / "new")
    document = json.loads(numbers.read_text(encoding="utf-8"))
    assert document["settings"]["baseline"] == "distill"
    assert document["settings"]["methods"][0]["label"] == "h2o"
    assert len(document["rows"]) == len(ROWS)
    assert document["rows"][5]["kl"] == 0
    assert document["environment"]["commit"] == report.fidelity.environment["commit"]
    assert {each["verdict"] for each in document["differences"]} >= {"nearer to full"}
    assert tables.read_text(encoding="utf-8") == markdown(report)
    pictures = {path.name: path.read_bytes() for path in (chart, tradeoff)}
    assert page.read_text(encoding="utf-8") == html(report, pictures)
    for picture in pictures.values():
        pixels = imread(io.BytesIO(picture))
        assert min(pixels.shape[:2]) > 200
        assert pixels.std() > 0.05
