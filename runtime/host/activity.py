"""What a rank does at the moment, for the report of a hang: written by its main thread at every instruction,
read by the thread that watches it (`runtime.training.hang_watch`). Assignments only, so it costs nothing.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

_TIMED_STEPS = 20


class Waiting(enum.Enum):
    """What has to happen elsewhere before a rank can go on."""

    NOTHING = "runs"
    PEERS = "waits for other ranks in"
    LOADER = "waits for its loader in"
    WRITER = "waits for its writer in"


class Activity:
    """The activity of this process. `what`: an object; its str() describes the activity. `since`: its start
    (monotonic seconds). `may_take_long`: for loading, compiling and saving, which take many times a step.
    `step`: the step that is trained, 0 before the first."""

    def __init__(self) -> None:
        self.step = 0
        self._step_seconds: deque[float] = deque(maxlen=_TIMED_STEPS)
        self.begin("starting", may_take_long=True)

    def begin(self, what: object, waits: Waiting = Waiting.NOTHING, may_take_long: bool = False) -> None:
        """Notes that something else begins."""
        self.what, self.waits, self.may_take_long = what, waits, may_take_long
        self.since = time.monotonic()

    @contextmanager
    def during(
        self, what: object, waits: Waiting = Waiting.NOTHING, may_take_long: bool = False
    ) -> Iterator[None]:
        """Notes what the body does, and afterwards that what was done before goes on."""
        before = self.what, self.waits, self.may_take_long
        self.begin(what, waits, may_take_long)
        yield
        self.begin(*before)

    def end_step(self, seconds: float) -> None:
        """Notes the duration of a step."""
        self._step_seconds.append(seconds)

    @property
    def median_step_s(self) -> float:
        """Median seconds of the last steps; 0 before the first."""
        return median(self._step_seconds) if self._step_seconds else 0.0
