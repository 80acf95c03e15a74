"""`tools.soak` sees growth: of memory, of descriptors and of threads."""

from __future__ import annotations

import os
from pathlib import Path

from tools.soak import Readings, split_readings


def test_the_first_and_the_last_readings_are_compared() -> None:
    warming, flat, growing = [9.0] * 20, [5.0] * 80, list(range(80))
    assert split_readings(warming + flat) == (5.0, 5.0)
    first, last = split_readings([*warming, *growing])
    assert first < 16 < 64 <= last


def test_what_this_process_holds_is_read(tmp_path: Path) -> None:
    readings = Readings(tmp_path)
    readings.read_processes(os.getpid())
    with (tmp_path / "file").open("w"):
        readings.read_processes(os.getpid())
    before, after = readings.descriptors["launcher"]
    assert after == before + 1
    assert readings.memory["launcher"][0] > 10 and readings.threads["launcher"][0] >= 1
