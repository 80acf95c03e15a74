"""A table that a benchmark prints as Markdown while it runs and, with `--json FILE`, writes for
`docs/benchmarks`.

A file says how it was made: {"command", "about", "machine", "columns", "rows"}. Cells are numbers where they
are numbers, [mean, worst] for "1.003/1.016", null where there is no figure, and texts otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

Cell = int | float | str | list[float] | None


def parse_cell(text: str) -> Cell:
    """A cell of a Markdown table as data: `0.33` is 0.33, `1.003/1.016` is [1.003, 1.016], `-` is None."""
    text = text.strip("*`")
    if text in ("", "-"):
        return None
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if re.fullmatch(r"[+-]?\d+\.\d+([eE][+-]?\d+)?", text):
        return float(text)
    pair = re.fullmatch(r"(\d+\.\d+)/(\d+\.\d+)", text)
    return [float(pair[1]), float(pair[2])] if pair else text


class BenchmarkTable:
    """Prints each row as soon as it is added, and rewrites the file with all rows so far.

    `about`: what the columns mean and what a row is compared with, for readers of the file.
    """

    def __init__(self, columns: Sequence[str], about: str, json_file: Path | None = None) -> None:
        self.columns, self.about, self.json_file = list(columns), about, json_file
        self.rows: list[list[Cell]] = []
        print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", flush=True)

    def add_row(self, *cells: object) -> None:
        """Adds a row.

        Raises:
            ValueError: there are more or fewer cells than columns.
        """
        texts = [str(cell) for cell in cells]
        if len(texts) != len(self.columns):
            raise ValueError(f"expected {len(self.columns)} cells, got {len(texts)}: {texts}")
        print(f"| {' | '.join(texts)} |", flush=True)
        self.rows.append([parse_cell(text) for text in texts])
        if self.json_file is not None:
            self.json_file.write_text(self.to_json())

    def to_json(self) -> str:
        """The file's text: one line per row, so that differences of versions are readable."""
        head = {
            "command": _command_line(),
            "about": self.about,
            "machine": f"{os.cpu_count()} cores, {_processor()}",
            "columns": self.columns,
        }
        lines = [
            f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}," for key, value in head.items()
        ]
        rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in self.rows)
        return "\n".join(["{", *lines, ' "rows": [', rows, " ]", "}", ""])


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--json FILE` to a benchmark's options."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to this file, too")


def _command_line() -> str:
    """The command as a reader would repeat it, without options that name files of this machine."""
    words = sys.argv[1:]
    for option in {"--json", "--keep"} & {*words}:
        at = words.index(option)
        words = words[:at] + words[at + 2 :]
    return " ".join(["python -m", f"tools.{Path(sys.argv[0]).stem}", *words])


def _processor() -> str:
    """The processor's name as Linux gives it, else what Python knows."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
