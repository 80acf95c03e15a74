"""The processes of ranks: those of an attempt on this machine, what a launcher asks of any group of ranks,
and how it waits for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from secc.runtime.host.parent_death import LAUNCHER_VARIABLE
from secc.runtime.host.process_table import StoppedProcesses
from secc.runtime.training.hang_watch import HANG_EXIT_CODE
from secc.runtime.training.launch import LOST_HELPER_EXIT_CODE, LOST_PEER_EXIT_CODE
from secc.runtime.training.rendezvous import ATTEMPT_VARIABLE

POLL_S = 0.05
_CAUSE_GRACE_S = 0.3  # after a rank has failed, for others that fail by themselves at the same time
_REPORT_GRACE_S = 15  # for the ranks' own report of a hang
_LOST_PEER_GRACE_S = 10  # after a rank has lost a peer, for that peer to say what happened


@dataclass(frozen=True)
class Loss:
    """Ranks that were lost without an exit code, and the cause in words."""

    ranks: tuple[int, ...]
    cause: str


class RankGroup(Protocol):
    """The ranks of an attempt."""

    @property
    def count(self) -> int:
        """The number of ranks."""
        ...

    def poll(self) -> Mapping[int, int]:
        """Returns the exit codes of the ranks that have ended by themselves."""
        ...

    def find_losses(self) -> Sequence[Loss]:
        """Returns what was lost without an exit code."""
        ...

    def ask_to_finish(self) -> None:
        """Asks all ranks to finish their step, save and end."""
        ...

    def kill(self) -> None:
        """Ends all processes and waits for them."""
        ...

    def name_process(self, rank: int) -> str:
        """Returns where a rank runs."""
        ...


class StopRequests:
    """Counts the signals that ask the run to stop; a context manager that restores the handlers.

    In a thread other than the main one Python cannot handle signals, so nothing is counted there."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self) -> None:
        self.count, self.last = 0, signal.SIGTERM
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._note) for s in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def wait(self, seconds: float) -> bool:
        """Waits for some seconds or a request; tells whether there is one."""
        deadline = time.monotonic() + seconds
        while not self.count and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.count > 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = signal.Signals(number)


class LocalRanks:
    """Ranks on this machine; a context manager that leaves none of their processes behind. `first`: the
    first rank of this machine; `place`: variables that say how the ranks meet."""

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        first: int,
        count: int,
        world_size: int,
        place: Mapping[str, str],
        attempt: int,
        devices: str | None,
        hang_timeout: float | None,
    ) -> None:
        self.count, self._first, self._hang_timeout = count, first, hang_timeout
        self._stopped, self._looked_at = StoppedProcesses(), 0.0
        self._hung: list[int] = []  # ranks that were stopped by a signal
        common = os.environ | dict(place)
        common |= {
            LAUNCHER_VARIABLE: str(os.getpid()),
            ATTEMPT_VARIABLE: str(attempt),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(count),
        }
        common |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
        command = [sys.executable, str(directory / "run.py"), *arguments]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for local in range(count):
                environment = common | {"RANK": str(first + local), "LOCAL_RANK": str(local)}
                process = subprocess.Popen(command, env=environment, start_new_session=True)
                self._processes[first + local] = process
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> dict[int, int]:
        """Returns the exit codes of the ranks that have ended by themselves."""
        return {r: code for r, p in self._processes.items() if (code := p.poll()) is not None}

    def find_losses(self) -> list[Loss]:
        """Returns the ranks that have been stopped for so long that the ranks' own watch, which says more,
        should have seen it: ranks have none before they have joined."""
        if self._hang_timeout is None:
            return []
        every, now = self._hang_timeout / 5, time.monotonic()
        if now - self._looked_at >= every:
            self._looked_at = now
            limit = self._hang_timeout + _REPORT_GRACE_S
            found = self._stopped.find_longer_than(limit, [p.pid for p in self._processes.values()])
            self._hung = [rank for rank, p in self._processes.items() if p.pid in found]
        return [
            Loss((rank,), f"the run makes no progress: rank {rank} ({self.name_process(rank)}) is stopped")
            for rank in self._hung
        ]

    def ask_to_finish(self) -> None:
        """Asks all ranks to finish their step, save and end."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends every process of the ranks' sessions, loaders and what the user's code started included."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()

    def name_process(self, rank: int) -> str:
        """Returns the process of a rank in words."""
        return f"process {self._processes[rank].pid}"


class Attempt:
    """Waits for the ranks of an attempt."""

    def __init__(self, ranks: RankGroup, requests: StopRequests) -> None:
        self._ranks, self._requests, self._passed_on = ranks, requests, 0
        self._losses: Sequence[Loss] = ()
        self.was_asked_to_finish = False

    def wait(self, may_finish: Callable[[], bool]) -> Mapping[int, int]:
        """Waits until all ranks have ended, or some have failed, and ends the rest. Asks the ranks to finish
        and save once `may_finish`. Returns the exit codes of those that ended by themselves."""
        deadline = float("inf")
        while True:
            codes = self._ranks.poll()
            failed = [code for code in codes.values() if code]
            self._losses = () if len(codes) == self._ranks.count else self._ranks.find_losses()
            if self._losses or len(codes) == self._ranks.count or time.monotonic() > deadline:
                self._ranks.kill()
                return codes
            if failed:
                only_lost = all(code == LOST_PEER_EXIT_CODE for code in failed)
                grace = _LOST_PEER_GRACE_S if only_lost else _CAUSE_GRACE_S
                deadline = min(deadline, time.monotonic() + grace)
            if self._requests.count > 1:
                deadline = 0.0
            elif self._requests.count > self._passed_on:
                self._passed_on = self._requests.count
                name = self._requests.last.name
                sys.stderr.write(f"{name}: the run ends after this step; once more ends it at once\n")
                self._ranks.ask_to_finish()
            elif not self.was_asked_to_finish and may_finish():
                self.was_asked_to_finish = True
                self._ranks.ask_to_finish()
            time.sleep(POLL_S)

    def report_failures(self, codes: Mapping[int, int]) -> tuple[int, list[int]]:
        """Returns the exit code of the launcher, and the ranks that were the cause, after printing these,
        unless a rank has printed a message. Ranks that lost a peer are not the cause, if there is another
        one; after a hang, those that did not end are."""
        for loss in self._losses:
            sys.stderr.write(f"error: {loss.cause}; all ranks were stopped\n")
        if self._losses:
            return 1, [rank for loss in self._losses for rank in loss.ranks]
        failures = {rank: code for rank, code in sorted(codes.items()) if code}
        if not failures:
            return 0, []
        if 2 in failures.values():
            return 2, []
        if HANG_EXIT_CODE in failures.values():
            return 1, [rank for rank in range(self._ranks.count) if rank not in codes]
        if LOST_HELPER_EXIT_CODE in failures.values():
            return 1, []
        causes = {rank: code for rank, code in failures.items() if code != LOST_PEER_EXIT_CODE} or failures
        for rank, code in causes.items():
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
            place = self._ranks.name_process(rank)
            sys.stderr.write(f"error: rank {rank} ({place}) {how}; all ranks were stopped\n")
        return 1, list(causes)
