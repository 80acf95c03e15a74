"""Output of commands: progress and messages on stderr; results on stdout, as tables or as JSON.

Names and paths in it come from other people's files: texts are never markup, and what a terminal would obey
is printed as escapes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

from secc.errors import printable_text
from secc.report.table_renderers import PAGE_WIDTH, make_rich_table
from secc.report.text_table import TextTable

_PART_INTERVAL_S = 10.0  # between lines about parts of a stage


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
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PAGE_WIDTH,
)
err = PlainConsole(stderr=True, highlight=False, markup=False, emoji=False)


def styled(text: object, style: str = "") -> Text:
    """A text in a style such as "bold"."""
    return Text(printable_text(str(text), newlines=True), style)


@contextmanager
def show_progress(quiet: bool, stages: Sequence[str] = ()) -> Iterator[Callable[[str], None]]:
    """Yield a function that reports the current step: a spinner on a terminal, elsewhere a line for each of
    the known `stages`, as `secc: 4 of 11  capture`, with the seconds of the one before. Steps that are no
    stages are parts of the current one, which have a line every ten seconds at most; without `stages` each
    has one. Nothing with `quiet`."""
    if quiet:
        yield lambda _: None
        return
    progress = _Progress(stages)
    if err.is_terminal:
        with err.status("") as status:
            yield lambda step: status.update(styled(f"{progress.describe(step)} …"))
    else:
        yield progress.print_line
    progress.finish()


class _Progress:
    """Counts the stages of long work, and times them."""

    def __init__(self, stages: Sequence[str]) -> None:
        self._stages, self._reached, self._current = list(stages), 0, ""
        self._started = self._stage_started = self._printed = time.monotonic()

    def describe(self, step: str) -> str:
        """The step as one line; a stage that comes again does not count back."""
        if not self._stages:
            return step
        if step in self._stages:
            self._reached = max(self._reached, self._stages.index(step) + 1)
            return f"{self._reached} of {len(self._stages)}  {step}"
        return f"{self._reached} of {len(self._stages)}  {self._stages[max(0, self._reached - 1)]}: {step}"

    def print_line(self, step: str) -> None:
        """Print a line if a stage begins, or if a part of it does and nothing was printed for a while."""
        now = time.monotonic()
        if self._stages and (step not in self._stages or self._stages.index(step) < self._reached):
            if step not in self._stages and now - self._printed >= _PART_INTERVAL_S:
                self._printed = now
                err.print(f"secc: {self.describe(step)}", style="dim")
            return
        self._printed = now
        before = f"  ({self._current}: {now - self._stage_started:.1f} s)" if self._current else ""
        self._current, self._stage_started = step, now
        err.print(f"secc: {self.describe(step)}{before}", style="dim")

    def finish(self) -> None:
        """Print how long all of it took."""
        if self._stages:
            err.print(f"secc: done in {time.monotonic() - self._started:.1f} s", style="dim")


def print_json(data: object) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(data, indent=2))


def print_table(table: TextTable) -> None:
    """Print a table, folded to the width of the terminal."""
    out.print(make_rich_table(table, out.width))


def print_differences(tables: Sequence[TextTable], as_json: bool) -> None:
    """Print the differences between two plans, as tables or as JSON."""
    if as_json:
        print_json({"equal": not tables, "tables": [dataclasses.asdict(t) for t in tables]})
        return
    for table in tables:
        print_table(table)
    if not tables:
        out.print("the plans are equal")
