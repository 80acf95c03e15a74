"""Tables of text as a terminal, a notebook and pandas show them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from secc.errors import printable_text
from secc.report.text_table import TextTable

SHORT_COLUMN = 16  # columns up to this width are wrapped last
PAGE_WIDTH = 100  # columns of text where there is no terminal that says otherwise
Facts = Sequence[tuple[str, str]]


def make_rich_table(table: TextTable, width: int) -> RichTable:
    """Returns the table folded to `width` columns."""
    rich_table = RichTable(
        title=table.title, title_justify="left", caption=table.note or None, caption_justify="left"
    )
    unwrapped = _unwrapped_columns(table, width)
    for i, column in enumerate(table.columns):
        rich_table.add_column(column, overflow="fold", no_wrap=i in unwrapped)
    for row in table.rows:
        # Texts, since tensor dimensions in brackets are not markup; what a terminal would obey is escaped.
        rich_table.add_row(*(Text(printable_text(cell, newlines=True)) for cell in row))
    return rich_table


def make_facts_grid(facts: Facts) -> RichTable:
    """Returns facts with their names to the right of a first column; long values wrap inside the second."""
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for fact in facts:
        grid.add_row(*(Text(printable_text(text, newlines=True)) for text in fact))
    return grid


def _unwrapped_columns(table: TextTable, width: int) -> set[int]:
    """The columns that are not wrapped on a terminal of this width: the shortest ones, as long as
    SHORT_COLUMN remains for each of the others."""
    lengths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    remaining = width - 3 * len(lengths) - 1  # each column has a border and two spaces
    unwrapped = set[int]()
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        others = len(lengths) - len(unwrapped) - 1
        if lengths[i] <= SHORT_COLUMN and remaining - lengths[i] >= SHORT_COLUMN * min(others, 1):
            unwrapped.add(i)
            remaining -= lengths[i]
    return unwrapped


def render_text(facts: Facts, tables: Sequence[TextTable], width: int = PAGE_WIDTH) -> str:
    """Returns facts, a line each, and tables as plain text of at most `width` columns."""
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(make_facts_grid(facts))
    for table in tables:
        console.print(make_rich_table(table, width))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def render_html(facts: Facts, tables: Sequence[TextTable]) -> str:
    """Returns facts and tables as HTML without scripts and styles of its own, for a notebook."""
    parts = [_html_table("", (), facts)] if facts else []
    parts += [_html_table(t.title, t.columns, t.rows, t.note) for t in tables]
    return "\n".join(parts)


def _html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    def cells(values: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(value)}</{tag}>" for value in values) + "</tr>"

    caption = f"<caption><b>{escape(title)}</b></caption>" if title else ""
    head = f"<thead>{cells(columns, 'th')}</thead>" if columns else ""
    body = "".join(cells(row, "td") for row in rows)
    below = f"<p><small>{escape(note)}</small></p>" if note else ""
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>{below}"


def to_data_frame(table: TextTable) -> Any:
    """Returns the table as a pandas data frame; columns of numbers become numbers. Raises ImportError without
    pandas."""
    import pandas  # pyright: ignore[reportMissingTypeStubs, reportMissingImports]

    frame: Any = pandas.DataFrame(list(table.rows), columns=list(table.columns))
    for column in frame.columns:
        try:
            frame[column] = pandas.to_numeric(frame[column])
        except (ValueError, TypeError):
            continue
    return frame
