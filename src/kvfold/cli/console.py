"""What commands print: tables and one JSON document on standard output, all else on standard error.

With `--json` a command calls `print_json` once and prints nothing else to standard output.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvfold.artifacts import json_text

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output.")
]
"""The type of every command's `json_output: JsonOption = False`."""

WIDE = 200
"""Columns of standard output when it is not a terminal."""
SECONDS_BETWEEN_LINES = 5.0
"""Between lines of progress, where there is no terminal for a bar."""


def stdout() -> Console:
    """The console of results. Without a terminal it is wide, so that tables are not folded."""
    fitting = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if fitting else WIDE, highlight=False)


def stderr() -> Console:
    """The console of everything that is not a result."""
    return Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Say one line on standard error."""
    stderr().print(text, markup=False, soft_wrap=True)


def print_json(document: object) -> None:
    """Print one JSON document to standard output; infinite and undefined numbers become null."""
    sys.stdout.write(json_text(document))


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Show the stages of long work on standard error: a bar, or now and then a line.

    Yields:
        To be told the stage at hand, and the share of all that is done, 0 to 1.
    """
    console = stderr()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    say = now_and_then(note)
    with bar:
        task = bar.add_task("starting", total=100)

        def report(stage: str, share: float) -> None:
            bar.update(task, description=stage, completed=int(100 * share))
            if not console.is_terminal:
                say(f"{share:4.0%} {stage}")

        yield report


def now_and_then(
    say: Callable[[str], None],
    *,
    seconds: float = SECONDS_BETWEEN_LINES,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[str], None]:
    """Thin out lines: the first is said, then one when enough time has passed.

    Args:
        say: Says a line.
        seconds: From one line to the next, at least.
        clock: Tells the time.
    """
    last = float("-inf")

    def offer(line: str) -> None:
        nonlocal last
        if clock() - last >= seconds:
            last = clock()
            say(line)

    return offer


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> Table:
    """A table whose columns of numbers, with or without units, stand to the right.

    Args:
        columns: The headings.
        rows: Cells in the order of the columns; None is shown as a dash.
        title: Above the table.
    """
    cells = [list(row) for row in rows]
    result = Table(title=title or None, title_justify="left")
    for index, name in enumerate(columns):
        numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
        result.add_column(name, justify="right" if numeric else "left")
    for row in cells:
        result.add_row(*map(_cell, row))
    return result


def facts(values: Mapping[str, object], *, title: str = "") -> Table:
    """A table of names and values, one a line."""
    result = Table(title=title or None, title_justify="left", show_header=False)
    for name, value in values.items():
        result.add_row(Text(name), _cell(value))
    return result


def quiet_libraries(*, debug: bool) -> None:
    """Keep other packages' warnings off the screen and send kvfold's to standard error.

    Args:
        debug: Show warnings, and messages from level INFO on.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("kvfold: %(levelname)s: %(message)s"))
    logger = logging.getLogger("kvfold")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO if debug else logging.WARNING)
    if not debug and not sys.warnoptions:
        warnings.simplefilter("ignore")


def _cell(value: object) -> Text:
    return Text("-" if value is None else str(value))


def _is_number(value: object) -> bool:
    return value is None or str(value).lstrip("+-")[:1].isdigit()
