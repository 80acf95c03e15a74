"""metrics.jsonl and the progress line."""

from __future__ import annotations

import io
import json
from pathlib import Path

from secc.runtime.monitoring.metrics import METRICS_FILE, MetricsLog


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rows(last: int) -> list[dict[str, float]]:
    return [
        {"step": s, "loss": 1.5, "grad_norm": 0.25, "samples": 8, "tokens": 100, "step_time_s": 0.5}
        for s in range(1, last + 1)
    ]


def write(directory: Path, stream: io.StringIO) -> str:
    metrics = MetricsLog(directory, 3, stream)
    for row in rows(3):
        metrics.log_step(row)
    metrics.close()
    return stream.getvalue()


def test_runs_append_to_the_file(tmp_path: Path) -> None:
    write(tmp_path, io.StringIO())
    write(tmp_path, io.StringIO())
    assert [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()] == rows(3) * 2


def test_terminal_shows_one_line_in_place(tmp_path: Path) -> None:
    shown = write(tmp_path, Terminal())
    assert shown.count("\r") == 3 and shown.count("\n") == 1
    assert "\rstep 3/3  loss 1.5000  grad norm 0.25  0.50 s/step  200 tokens/s" in shown


def test_log_file_gets_few_lines_and_the_last(tmp_path: Path) -> None:
    assert [line.split()[1] for line in write(tmp_path, io.StringIO()).splitlines()] == ["1/3", "3/3"]
