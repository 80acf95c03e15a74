"""Says on rank 0 what a run does before its first step, a line for each phase when it begins: importing
libraries, reading the model file, meeting the other ranks and building the model take seconds to minutes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from secc.runtime.monitoring.json_lines import say


class StartPhases:
    """The phases of a start. `is_silent`: on ranks other than 0."""

    def __init__(self, is_silent: bool) -> None:
        self._is_silent, self._phase = is_silent, "import libraries"
        self._started = self._phase_started = time.monotonic() - _process_age_s()

    def begin(self, phase: str) -> None:
        """Says that a phase begins, and how long the one before took."""
        now = time.monotonic()
        self._say(f"start: {phase}", now)
        self._phase, self._phase_started = phase, now

    def finish(self) -> None:
        """Says that the first step begins. Later calls say nothing."""
        now = time.monotonic()
        self._say(f"start: done in {now - self._started:.1f} s", now)
        self._is_silent = True

    def _say(self, text: str, now: float) -> None:
        if not self._is_silent:
            say(f"{text}  ({self._phase}: {now - self._phase_started:.1f} s)")


def _process_age_s() -> float:
    """Returns the seconds since this process was started; 0 where the system does not say."""
    try:
        # The 22nd field, in clock ticks since boot; the second one, a name in parentheses, may have blanks.
        ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
