"""The launcher: starts the ranks of a plan on this machine, watches them, starts them again after a failure,
and ends them. `secc run` calls it; `python -m secc.runtime.training.supervisor PLAN [options]` does the same
without the compiler.

Ranks meet in a private folder (`rendezvous`), and every process of a rank belongs to the rank's own session,
which the launcher kills as a whole. A launcher that is killed itself leaves nothing behind either: its ranks
have asked the kernel to die with it (`runtime.host.parent_death`).

The first SIGINT, SIGTERM or SIGUSR1 is passed on: the ranks finish their step, save and end. The second one
ends them at once.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from secc.runtime.errors import UserError
from secc.runtime.host.parent_death import LAUNCHER_VARIABLE
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.training.hang_watch import HANG_EXIT_CODE
from secc.runtime.training.launch import LOST_HELPER_EXIT_CODE, LOST_PEER_EXIT_CODE
from secc.runtime.training.machine_check import check_machine
from secc.runtime.training.options import parse_options
from secc.runtime.training.rendezvous import ATTEMPT_VARIABLE, STORE_VARIABLE, restart_pause

_ENVIRONMENT_DEFAULTS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
_POLL_S = 0.05
_STEADY_S = 300  # an attempt that ran longer did not fail at once
_CAUSE_GRACE_S = 0.3  # after a rank has failed, for others that fail by themselves at the same time
_LOST_PEER_GRACE_S = 10  # after a rank has lost a peer, for that peer to say what happened


def run_plan(directory: str | Path, arguments: Sequence[str] = ()) -> int:
    """Trains the plan in `directory` with all its ranks on this machine; `arguments` are those of run.py.

    After a failure all ranks start again, `--max-restarts` times at most, from the newest checkpoint in
    `--save`. A UserError would be raised again, so it ends the run.

    Returns 0; 2 after a UserError on the ranks, which has been printed; 1 if a rank died, after a message
    that names it; 128 + n if signal n ended the run at once. Leaves no process behind. Raises UserError for a
    plan or options that cannot be read, and for a machine without the plan's devices.
    """
    directory = Path(directory).resolve()
    options, plan = parse_options(arguments), load_plan(directory)
    if options.emulate is None:
        check_machine(plan, range(plan.world_size), options.share_gpus)
    private_folder = tempfile.TemporaryDirectory(prefix="secc-")
    with private_folder as folder, rank_environment(), _StopRequests() as requests:
        quick_failures = 0
        for attempt in itertools.count():
            began = time.monotonic()
            store = Path(folder) / f"store_{attempt}"
            with _RankGroup(directory, arguments, plan.world_size, store, requests, attempt) as ranks:
                codes = ranks.wait()
            if requests.count > 1 or (requests.count and any(codes.values())):
                return 128 + requests.last
            result = ranks.report_failures(codes)
            if result != 1 or attempt == options.max_restarts:
                return result
            quick_failures = 1 if time.monotonic() - began > _STEADY_S else quick_failures + 1
            pause = restart_pause(quick_failures)
            source = (
                f"the newest checkpoint in {options.save}" if options.save else "the beginning (no --save)"
            )
            sys.stderr.write(f"restart {attempt + 1} of {options.max_restarts} in {pause} s from {source}\n")
            if requests.wait(pause):
                return 128 + requests.last
    raise AssertionError("unreachable")


class _StopRequests:
    """Counts the signals that ask the run to stop; a context manager that restores the handlers.

    In a thread other than the main one Python cannot handle signals, so nothing is counted there."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

    def __init__(self) -> None:
        self.count, self.last = 0, signal.SIGTERM
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> _StopRequests:
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
            time.sleep(_POLL_S)
        return self.count > 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.last = signal.Signals(number)


class _RankGroup:
    """The processes of one attempt; a context manager that leaves none of them behind."""

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        world_size: int,
        store: Path,
        requests: _StopRequests,
        attempt: int,
    ) -> None:
        self._requests, self._passed_on = requests, 0
        common = os.environ | {
            LAUNCHER_VARIABLE: str(os.getpid()),
            STORE_VARIABLE: str(store),
            ATTEMPT_VARIABLE: str(attempt),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        command = [sys.executable, str(directory / "run.py"), *arguments]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._processes.append(subprocess.Popen(command, env=environment, start_new_session=True))
        except BaseException:
            self._kill()
            raise

    def __enter__(self) -> _RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def wait(self) -> dict[int, int]:
        """Waits until all ranks have ended, or some have failed, and ends the rest. Returns the exit codes of
        those that ended by themselves."""
        deadline = float("inf")
        while True:
            codes = {r: code for r, p in enumerate(self._processes) if (code := p.poll()) is not None}
            failed = [code for code in codes.values() if code]
            if len(codes) == len(self._processes) or time.monotonic() > deadline:
                self._kill()
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
                for process in self._processes:
                    with suppress(ProcessLookupError):
                        process.send_signal(signal.SIGTERM)
            time.sleep(_POLL_S)

    def report_failures(self, codes: dict[int, int]) -> int:
        """Returns the exit code of the launcher, after printing which ranks were the cause, unless a rank has
        printed a message. Ranks that lost a peer are not the cause, if there is another one."""
        failures = {rank: code for rank, code in sorted(codes.items()) if code}
        if not failures:
            return 0
        if 2 in failures.values():
            return 2
        if {HANG_EXIT_CODE, LOST_HELPER_EXIT_CODE} & {*failures.values()}:
            return 1
        causes = {rank: code for rank, code in failures.items() if code != LOST_PEER_EXIT_CODE} or failures
        for rank, code in causes.items():
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
            pid = self._processes[rank].pid
            sys.stderr.write(f"error: rank {rank} (process {pid}) {how}; all ranks were stopped\n")
        return 1

    def _kill(self) -> None:
        """Ends every process of the ranks' sessions, loaders and what the user's code started included."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()


@contextmanager
def rank_environment() -> Iterator[None]:
    """Sets the environment of the ranks: one thread and the loopback device unless given otherwise, and this
    secc on the import path."""
    before = {name: os.environ.get(name) for name in (*_ENVIRONMENT_DEFAULTS, "PYTHONPATH")}
    for name, value in _ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [before["PYTHONPATH"], str(Path(__file__).parents[3])])
    )
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


if __name__ == "__main__":
    try:
        sys.exit(run_plan(sys.argv[1], sys.argv[2:]))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
