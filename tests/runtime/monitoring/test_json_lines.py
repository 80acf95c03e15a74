"""Files of JSON lines: strict, without torn lines, and no end of a run."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

from secc.runtime.monitoring.json_lines import NOT_FINITE, JsonLinesFile, encode_line


def strict(line: str) -> dict[str, object]:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(line, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_and_named() -> None:
    line = strict(
        encode_line({"step": 1, "loss": math.nan, "grad_norm": -math.inf, "more": {"a": [math.inf]}})
    )
    assert line == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "more": {"a": [None]},
        NOT_FINITE: {"loss": "nan", "grad_norm": "-inf"},
    }


def test_a_full_disk_is_said_once_and_no_line_is_torn(tmp_path: Path) -> None:
    said, path = io.StringIO(), tmp_path / "lines"
    path.symlink_to("/dev/full")
    file = JsonLinesFile(path, said)
    file.write({"step": 1})
    file.write({"step": 2})
    assert said.getvalue().count("cannot write") == 1 and "No space left on device" in said.getvalue()
    path.unlink()
    file.write({"step": 3})
    assert path.read_text() == '{"step": 3}\n'


def test_a_missing_folder_and_a_closed_stream_end_nothing(tmp_path: Path) -> None:
    said = io.StringIO()
    said.close()
    JsonLinesFile(tmp_path / "missing" / "lines", said).write({"step": 1})


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"step": 1}\n{"st')
    JsonLinesFile(path).write({"step": 2})
    assert [strict(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"step": 2}]
    os.truncate(path, 5)
    JsonLinesFile(path).write({"step": 3})
    assert path.read_text() == '{"step": 3}\n'
