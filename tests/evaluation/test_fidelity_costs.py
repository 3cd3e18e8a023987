"""Time and memory of rows whose numbers are known, as tables."""

from __future__ import annotations

from dataclasses import replace

from kvfold.bench.spread import Spread
from kvfold.evaluation.fidelity_costs import costs
from kvfold.evaluation.fidelity_found import Fidelity, Subject
from kvfold.evaluation.fidelity_pages import html, markdown
from kvfold.evaluation.fidelity_report import Report, report_of
from kvfold.evaluation.fidelity_rows import Row
from kvfold.evaluation.fidelity_settings import FidelitySettings, MethodSpec
from kvfold.evaluation.fidelity_tables import COST_TITLE
from tests.evaluation.test_fidelity_report import ROWS, row


def timed(each: Row, rate: float, *, rows: int = 4) -> Row:
    return replace(
        each,
        batch_rows=rows,
        first_token_seconds=each.index + 1.5,
        tokens_per_second=rate,
        bytes_peak=(each.index + 1) * 2**20,
    )


TIMED = (
    *(timed(row("full", "prose", index, 0.0), 10) for index in range(3)),
    *(timed(row("h2o", "prose", index, 0.1), 15 + 5 * index) for index in range(3)),
    row("h2o", "prose", 3, 0.1),
    timed(row("h2o", "niah", 0, 0.1), 40, rows=1),
    timed(replace(row("h2o", "prose", 0, 0.1), length=9), 50),
)


def report(rows: tuple[Row, ...]) -> Report:
    settings = FidelitySettings(methods=(MethodSpec("h2o", "h2o"),), sets=("prose", "niah"))
    subject = Subject("tiny", "f" * 64, "float32", "cpu", {}, {})
    return report_of(Fidelity("kvfold eval", subject, settings, rows, process_peak=3 * 2**29))


def middle(spread: Spread | None) -> tuple[float, float, float]:
    assert spread is not None
    return spread.median, spread.lowest, spread.highest


def test_medians_and_ranges_by_set_length_and_run() -> None:
    full, h2o, task, other = costs(TIMED)
    assert [(c.set, c.length, c.method) for c in (full, h2o, task, other)] == [
        *(("prose", 0, "full"), ("prose", 0, "h2o"), ("niah", 0, "h2o"), ("prose", 9, "h2o")),
    ]
    assert middle(h2o.tokens_per_second) == (20, 15, 25)
    assert middle(h2o.first_token_seconds) == (2.5, 1.5, 3.5)
    assert middle(h2o.bytes_peak) == (2 * 2**20, 2**20, 3 * 2**20)
    assert (middle(h2o.batch_rows), middle(task.batch_rows)) == ((4, 4, 4), (1, 1, 1))
    assert middle(other.tokens_per_second) == (50, 50, 50)


def test_what_has_said_nothing_has_no_rate() -> None:
    silent = replace(TIMED[0], tokens_per_second=None)
    assert costs([silent])[0].tokens_per_second is None


def test_pages_say_that_it_is_no_benchmark() -> None:
    text = markdown(report(TIMED[:6]))
    for expected in (
        f"## {COST_TITLE}",
        "| set | length | method | budget | rows | first token s | tokens/s | MiB |",
        "| prose | 0 | h2o | 0.25 | 4 | 2.50 (1.50 to 3.50) | 20.0 (15.0 to 25.0) | "
        "2.00 (1.00 to 3.00) |",
        "| prose | 0 | full | 1.0 | 4 | 2.50 (1.50 to 3.50) | 10.0 | 2.00 (1.00 to 3.00) |",
        "The process took 1.5 GiB",
    ):
        assert expected in text
    assert f"<h2>{COST_TITLE}</h2>" in html(report(TIMED[:6]), {})
    document = report(TIMED[:6]).to_dict()
    assert document["process_peak"] == 3 * 2**29
    assert COST_TITLE not in markdown(report(ROWS)), "old rows have nothing to say"
