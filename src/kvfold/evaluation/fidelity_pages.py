"""An evaluation of fidelity as one page: Markdown, or HTML that holds its pictures."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from kvfold.evaluation.fidelity_report import Report
from kvfold.evaluation.fidelity_tables import Part, Table, parts

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto }
img { max-width: 100% }
"""


def markdown(report: Report) -> str:
    """The whole report as Markdown."""
    lines: list[str] = []
    for number, part in enumerate(parts(report)):
        lines.append(f"{'#' if number == 0 else '##'} {part.title}")
        table = None if part.table is None else _markdown_table(part.table)
        command = None if part.command is None else f"```\n{part.command}\n```"
        lines += [each for each in (table, part.text, command) if each is not None]
    return "\n\n".join(lines) + "\n"


def html(report: Report, pictures: Mapping[str, bytes]) -> str:
    """The whole report as a page that needs nothing besides itself.

    Args:
        report: An evaluation with its statistics.
        pictures: PNGs by name, shown after what was asked.
    """
    first, *others = parts(report)
    body = [*_html_part(first, "h1"), *map(_html_picture, pictures, pictures.values())]
    for part in others:
        body += _html_part(part, "h2")
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f"<title>{escape(first.title)}</title>\n<style>{_STYLE}</style>\n"
        + "\n".join(body)
        + "\n</html>\n"
    )


def _html_part(part: Part, heading: str) -> Iterator[str]:
    yield f"<{heading}>{escape(part.title)}</{heading}>"
    if part.table is not None:
        yield _html_table(part.table)
    if part.text is not None:
        yield f"<p>{escape(part.text)}</p>"
    if part.command is not None:
        yield f"<pre>{escape(part.command)}</pre>"


def _html_picture(name: str, picture: bytes) -> str:
    data = b64encode(picture).decode("ascii")
    return f'<p><img alt="{escape(name)}" src="data:image/png;base64,{data}"></p>'


def _html_table(table: Table) -> str:
    rows = [_html_row(table.columns, "th"), *(_html_row(row, "td") for row in table.rows)]
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _html_row(cells: Iterable[str | None], kind: str) -> str:
    return "<tr>" + "".join(f"<{kind}>{escape(_shown(cell))}</{kind}>" for cell in cells) + "</tr>"


def _markdown_table(table: Table) -> str:
    lines: list[Sequence[str | None]] = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "\n".join(
        "| " + " | ".join(_shown(cell).replace("|", r"\|") for cell in line) + " |"
        for line in lines
    )


def _shown(cell: str | None) -> str:
    return "-" if cell is None else cell
