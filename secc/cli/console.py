"""Output of commands: progress and messages on stderr; results on stdout, as tables or as JSON.

Names and paths in it come from other people's files: texts are never markup, and what a terminal would obey
is printed as escapes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from secc.errors import printable_text
from secc.report.text_table import TextTable

# Width of output to files and pipes, which are not limited to 80 columns.

FILE_WIDTH = 140
SHORT_COLUMN = 16  # columns up to this width are wrapped last


class PlainConsole(Console):
    """A console that prints texts as they are, also in tables, but for what a terminal would obey."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a Text of what is printed."""
        options["markup"] = False
        return super().render_str(printable_text(text, newlines=True), **options)


out = PlainConsole(
    highlight=False,
    markup=False,
    emoji=False,
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH,
)
err = PlainConsole(stderr=True, highlight=False, markup=False, emoji=False)


def styled(text: object, style: str = "") -> Text:
    """A text in a style such as "bold"."""
    return Text(printable_text(str(text), newlines=True), style)


@contextmanager
def show_progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports the current step: a spinner on a terminal, one line per step
    elsewhere, nothing with `quiet`."""
    if quiet:
        yield lambda _: None
    elif err.is_terminal:
        with err.status("") as status:
            yield lambda step: status.update(styled(f"{step} …"))
    else:
        yield lambda step: err.print(f"secc: {step}", style="dim")


def print_json(data: object) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(data, indent=2))


def print_table(table: TextTable) -> None:
    """Print a table, folded to the width of the terminal."""
    rich_table = RichTable(
        title=table.title, title_justify="left", caption=table.note or None, caption_justify="left"
    )
    unwrapped = _unwrapped_columns(table, out.width)
    for i, column in enumerate(table.columns):
        rich_table.add_column(column, overflow="fold", no_wrap=i in unwrapped)
    for row in table.rows:
        rich_table.add_row(*row)
    out.print(rich_table)


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


def print_differences(tables: Sequence[TextTable], as_json: bool) -> None:
    """Print the differences between two plans, as tables or as JSON."""
    if as_json:
        print_json({"equal": not tables, "tables": [dataclasses.asdict(t) for t in tables]})
        return
    for table in tables:
        print_table(table)
    if not tables:
        out.print("the plans are equal")
