"""What is shown while weights are read: how much, how fast, and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

from secc.runtime.monitoring.metrics import duration_text

READ_STAGE, WRITE_STAGE = "read the weights", "write them"
_MIB, _GIB = 2**20, 2**30


class ReadingRate:
    """Shows how much has been read since it was made."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._started = show, time.monotonic()

    def show(self, done: int, total: int) -> None:
        """Shows that `done` of `total` bytes were read."""
        rate = max(1, done) / max(1e-9, time.monotonic() - self._started)
        left = duration_text((total - done) / rate)
        unit, name = (_GIB, "GiB") if total >= _GIB else (_MIB, "MiB")
        self._show(f"{done / unit:.2f} of {total / unit:.2f} {name}, {rate / unit:.2f} {name}/s, {left} left")
