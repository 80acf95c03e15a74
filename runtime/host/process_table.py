"""Processes of this machine as Linux lists them in /proc: their states, names and children (proc(5))."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

STOPPED = "stopped"
_STATES = {"T": STOPPED, "t": "being traced", "D": "in an uninterruptible wait", "Z": "dead"}
_PROC = Path("/proc")


def process_state(pid: int) -> str:
    """Returns what a process is doing, in words."""
    fields = _stat_fields(pid)
    return _STATES.get(fields[0], "alive") if fields else "gone"


def process_name(pid: int) -> str:
    """Returns the name of a process in lists of processes; "" if it is gone."""
    with suppress(OSError):
        return (_PROC / str(pid) / "comm").read_text(encoding="utf-8").strip()
    return ""


def find_descendants(root: int) -> list[int]:
    """Returns the processes that `root` has started, and those that these have started, oldest first."""
    parents = dict[int, int]()
    with suppress(OSError):  # a system without /proc
        for entry in _PROC.iterdir():
            fields = _stat_fields(int(entry.name)) if entry.name.isdecimal() else []
            if fields:
                parents[int(entry.name)] = int(fields[1])
    found, new = list[int](), {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found += new
    return sorted(found)


class StoppedProcesses:
    """Remembers since when processes have been stopped by a signal, each time it looks at them."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, state: Callable[[int], str] = process_state
    ) -> None:
        self._clock, self._state = clock, state
        self._since: Mapping[int, float] = {}

    def find_longer_than(self, seconds: float, processes: Iterable[int]) -> list[int]:
        """Returns the processes that were stopped at every look of this object in the last `seconds` seconds
        or longer."""
        now = self._clock()
        self._since = {p: self._since.get(p, now) for p in processes if self._state(p) == STOPPED}
        return [pid for pid, since in self._since.items() if now - since >= seconds]


def _stat_fields(pid: int) -> list[str]:
    """Returns the fields of a process from its state on; [] if it is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return []
