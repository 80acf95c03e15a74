"""What commands print: progress and messages on stderr, results on stdout, as tables for people or as JSON
for machines."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from secc.report.text_table import TextTable

# columns of what is not shown on a terminal: read in files and logs, which do not end at the eightieth
FILE_WIDTH = 140
SHORT_COLUMN = 16  # a column of cells this long is not broken while the others keep as much

out = Console(highlight=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else FILE_WIDTH)
err = Console(stderr=True, highlight=False)


@contextmanager
def show_progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows which step is running: a spinner on a terminal, a line a step elsewhere, nothing
    if quiet."""
    if quiet:
        yield lambda _: None
    elif err.is_terminal:
        with err.status("") as status:
            yield lambda step: status.update(f"{step} …")
    else:
        yield lambda step: err.print(f"secc: {step}", style="dim")


def print_json(data: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=2))


def print_table(table: TextTable) -> None:
    """A table for people."""
    shown = RichTable(
        title=table.title, title_justify="left", caption=table.note or None, caption_justify="left"
    )
    whole = _unwrapped_columns(table, out.width)
    for i, column in enumerate(table.columns):
        shown.add_column(column, overflow="fold", no_wrap=i in whole)
    for row in table.rows:
        shown.add_row(*map(escape, row))  # dims of tensors are no markup
    out.print(shown)


def _unwrapped_columns(table: TextTable, width: int) -> set[int]:
    """The columns whose words stay whole on so wide a terminal: the shortest ones, as long as all others have
    room left."""
    lengths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    left, whole = (
        width - 3 * len(lengths) - 1,
        set[int](),
    )  # a border and a space on either side of each column
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        others = len(lengths) - len(whole) - 1
        if lengths[i] <= SHORT_COLUMN and left - lengths[i] >= SHORT_COLUMN * min(others, 1):
            whole.add(i)
            left -= lengths[i]
    return whole


def print_differences(found: Sequence[TextTable], as_json: bool) -> None:
    """What differs between two plans, as tables or as JSON."""
    if as_json:
        print_json({"equal": not found, "tables": [dataclasses.asdict(t) for t in found]})
        return
    for table in found:
        print_table(table)
    if not found:
        out.print("the plans decide the same")
