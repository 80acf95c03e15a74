"""What commands print: progress and messages on stderr, results on stdout, as tables for people or as JSON for machines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from secc.report.table import Table

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows which step is running: a spinner on a terminal, a line a step elsewhere, nothing if quiet."""
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


def print_table(table: Table) -> None:
    """A table for people."""
    shown = RichTable(title=table.title, title_justify="left", caption=table.note or None, caption_justify="left")
    for column in table.columns:
        shown.add_column(column, overflow="fold")
    for row in table.rows:
        shown.add_row(*map(escape, row))  # dims of tensors are no markup
    out.print(shown)


def print_differences(found: Sequence[Table], as_json: bool) -> None:
    """What differs between two plans, as tables or as JSON."""
    if as_json:
        print_json({"equal": not found, "tables": [dataclasses.asdict(t) for t in found]})
        return
    for table in found:
        print_table(table)
    if not found:
        out.print("the plans decide the same")
