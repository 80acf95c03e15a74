"""Requests to end a run early: SIGTERM, SIGINT and SIGUSR1, which Slurm sends before a job's time is over.

A rank only notes a signal. The ranks agree on it in the sums at the end of each step, so that all of them end
after the same step.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType

from secc.runtime.host.child_processes import STOP_SIGNALS

_ONE_REQUEST_S = 1.0  # signals that arrive together, from a terminal and from the launcher, are one request


class StopRequest:
    """Notes the first signal; a later one ends the process at once. Handles signals once `listen` is called
    from the main thread."""

    def __init__(self) -> None:
        self.is_set, self._noted_at = False, 0.0

    def listen(self) -> None:
        """Starts to handle signals; before, they end the process."""
        with suppress(ValueError):  # not the main thread
            for number in STOP_SIGNALS:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.is_set and now - self._noted_at > _ONE_REQUEST_S:
            os._exit(128 + number)
        if not self.is_set:
            self.is_set, self._noted_at = True, now
