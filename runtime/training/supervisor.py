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
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from secc.runtime.errors import UserError
from secc.runtime.host.parent_death import LAUNCHER_VARIABLE
from secc.runtime.host.private_folder import hold_private_folder
from secc.runtime.host.process_table import StoppedProcesses
from secc.runtime.parameters.checkpoint_copies import COPIES_VARIABLE, CopyKeeper
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.training.hang_watch import HANG_EXIT_CODE
from secc.runtime.training.launch import LOST_HELPER_EXIT_CODE, LOST_PEER_EXIT_CODE
from secc.runtime.training.machine_check import check_machine
from secc.runtime.training.options import RunOptions, parse_options
from secc.runtime.training.rendezvous import ATTEMPT_VARIABLE, STORE_VARIABLE, restart_pause

_ENVIRONMENT_DEFAULTS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
# Makes the plan for a number of ranks from a plan directory, and returns the directory of the new plan.
Replanner = Callable[[Path, int], Path]
_POLL_S = 0.05
_STEADY_S = 300  # an attempt that ran longer did not fail at once
_CAUSE_GRACE_S = 0.3  # after a rank has failed, for others that fail by themselves at the same time
_REPORT_GRACE_S = 15  # for the ranks' own report of a hang
_LOST_PEER_GRACE_S = 10  # after a rank has lost a peer, for that peer to say what happened


def run_plan(directory: str | Path, arguments: Sequence[str] = (), replan: Replanner | None = None) -> int:
    """Trains the plan in `directory` with all its ranks on this machine; `arguments` are those of run.py.

    After a failure all ranks start again, `--max-restarts` times at most, from the newest checkpoint in
    `--save`. A UserError would be raised again, so it ends the run. With `--on-loss replan`, `replan` makes
    the plan for the ranks that are left; after `--rejoin-after` seconds all ranks are tried again.

    Returns 0; 2 after a UserError on the ranks, which has been printed; 1 if a rank died, after a message
    that names it; 128 + n if signal n ended the run at once. Leaves no process behind. Raises UserError for a
    plan or options that cannot be read, and for a machine without the plan's devices.
    """
    directory = Path(directory).resolve()
    options, plan = parse_options(arguments), load_plan(directory)
    if options.emulate is None:
        check_machine(plan, range(plan.world_size), options.share_gpus)
    if options.on_loss == "replan" and replan is None:
        raise UserError("--on-loss replan needs the compiler", remedy="start the plan by `secc run`")
    with (
        hold_private_folder() as folder,
        rank_environment(),
        _StopRequests() as requests,
        _keep_copies(folder, options.replicate),
    ):
        supervisor = _Supervisor(directory, arguments, options, plan.world_size, replan, requests)
        return supervisor.run(folder)


class _Supervisor:
    """Runs one attempt after the other, under the plan or one for fewer ranks. `_lost`: ranks of the plan
    that the present attempt does without. `_rejoin_at`: when they are tried again."""

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        options: RunOptions,
        world_size: int,
        replan: Replanner | None,
        requests: _StopRequests,
    ) -> None:
        logs = options.log_dir or directory / "logs"  # also of a plan for fewer ranks
        self._arguments = [*arguments, "--log-dir", str(logs)]
        self._directory, self._options, self._world_size = directory, options, world_size
        self._make_plan, self._requests = replan, requests
        self._plan, self._lost = directory, list[int]()
        self._rejoin_at, self._quarantine_s = float("inf"), options.rejoin_after
        self._failures, self._quick_failures = 0, 0

    def run(self, folder: Path) -> int:
        """Returns the exit code of the run; `folder` is private to it."""
        for attempt in itertools.count():
            began, count = time.monotonic(), self._world_size - len(self._lost)
            devices = _visible_devices(self._world_size, self._lost)
            store, requests = folder / f"store_{attempt}", self._requests
            limit = self._options.hang_timeout
            ranks = _RankGroup(self._plan, self._arguments, count, store, requests, attempt, devices, limit)
            with ranks:
                codes = ranks.wait(finish_at=self._rejoin_at)
            if requests.count > 1 or (requests.count and any(codes.values())):
                return 128 + requests.last
            # Ranks that are still starting when they are asked end without a save, and so do their peers.
            if ranks.was_asked_to_finish and not requests.count and 2 not in codes.values():
                sys.stderr.write(f"rank {self._lost_text()} is tried again: returning to {self._directory}\n")
                self._plan, self._lost, self._rejoin_at = self._directory, [], float("inf")
                continue
            result, causes = ranks.report_failures(codes)
            ended = self._failures == self._options.max_restarts or self._options.on_loss == "stop"
            if result != 1 or ended:
                if causes:
                    sys.stderr.write(f"  what to do: {self._remedy(codes, causes)}\n")
                return result
            self._failures += 1
            steady = time.monotonic() - began > _STEADY_S
            self._quick_failures = 1 if steady else self._quick_failures + 1
            if self._options.on_loss == "replan" and causes:
                self._go_on_without(causes)
            pause = restart_pause(self._quick_failures)
            saved = self._options.save
            source = f"the newest checkpoint in {saved}" if saved else "the beginning (no --save)"
            sys.stderr.write(
                f"restart {self._failures} of {self._options.max_restarts} in {pause} s from {source}\n"
            )
            if requests.wait(pause):
                return 128 + requests.last
        raise AssertionError("unreachable")

    def _remedy(self, codes: Mapping[int, int], causes: Sequence[int]) -> str:
        """Returns what a user can do after ranks have ended by themselves and are not started again."""
        cause = "read what the rank has printed"
        if any(codes.get(rank) == -signal.SIGKILL for rank in causes):
            cause = "see whether the host was out of memory (dmesg)"
        if self._options.save is None:
            return f"{cause}; with --save DIR and --max-restarts N a run continues by itself"
        return f"{cause}; continue with --resume auto, by itself with --max-restarts N"

    def _go_on_without(self, causes: Collection[int]) -> None:
        """Plans for the ranks that are left after `causes` were lost; if that cannot be done, all ranks start
        again."""
        assert self._make_plan is not None
        present = [r for r in range(self._world_size) if r not in self._lost]
        self._lost = sorted({*self._lost, *(present[rank] for rank in causes)})
        left = self._world_size - len(self._lost)
        began = time.monotonic()
        try:
            if left < 1:
                raise UserError("no rank is left")
            self._plan = self._make_plan(self._directory, left)
        except UserError as error:
            sys.stderr.write(f"cannot go on with {left} ranks, so all are started again: {error.message}\n")
            self._plan, self._lost, self._rejoin_at = self._directory, [], float("inf")
            return
        now = time.monotonic()
        self._rejoin_at = now + self._quarantine_s
        sys.stderr.write(
            f"rank {self._lost_text()} is lost: going on with {left} ranks under {self._plan}, planned in"
            f" {now - began:.1f} s\n"
        )
        self._quarantine_s *= 2  # a device that fails again is tried less often

    def _lost_text(self) -> str:
        return ", ".join(map(str, self._lost))


def _visible_devices(world_size: int, lost: Collection[int]) -> str | None:
    """Returns CUDA_VISIBLE_DEVICES for the ranks that are left; None if all devices stay."""
    if not lost:
        return None
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(world_size)))).split(",")
    return ",".join(device for rank, device in enumerate(devices) if rank not in lost)


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
        devices: str | None,
        hang_timeout: float | None,
    ) -> None:
        self._hang_timeout, self._stopped, self._looked_at = hang_timeout, StoppedProcesses(), 0.0
        self._hung: list[int] = []  # ranks that were stopped by a signal
        self._requests, self._passed_on, self.was_asked_to_finish = requests, 0, False
        common = os.environ | {
            LAUNCHER_VARIABLE: str(os.getpid()),
            STORE_VARIABLE: str(store),
            ATTEMPT_VARIABLE: str(attempt),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        common |= {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
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

    def wait(self, finish_at: float) -> dict[int, int]:
        """Waits until all ranks have ended, or some have failed, and ends the rest. Asks the ranks to finish
        and save at the moment `finish_at`. Returns the exit codes of those that ended by themselves."""
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
            if self._finds_stopped_rank():
                self._kill()
                return codes
            if self._requests.count > 1:
                deadline = 0.0
            elif self._requests.count > self._passed_on:
                self._passed_on = self._requests.count
                name = self._requests.last.name
                sys.stderr.write(f"{name}: the run ends after this step; once more ends it at once\n")
                self._ask_to_finish()
            elif time.monotonic() > finish_at and not self.was_asked_to_finish:
                self.was_asked_to_finish = True
                self._ask_to_finish()
            time.sleep(_POLL_S)

    def _finds_stopped_rank(self) -> bool:
        """Tells whether a rank has been stopped for so long that the ranks' own watch, which says more,
        should have seen it: ranks have none before they have joined."""
        if self._hang_timeout is None:
            return False
        every, now = self._hang_timeout / 5, time.monotonic()
        if now - self._looked_at >= every:
            self._looked_at = now
            limit = self._hang_timeout + _REPORT_GRACE_S
            found = self._stopped.find_longer_than(limit, [p.pid for p in self._processes])
            self._hung = [rank for rank, p in enumerate(self._processes) if p.pid in found]
        return bool(self._hung)

    def _ask_to_finish(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def report_failures(self, codes: dict[int, int]) -> tuple[int, list[int]]:
        """Returns the exit code of the launcher, and the ranks that were the cause, after printing these,
        unless a rank has printed a message. Ranks that lost a peer are not the cause, if there is another
        one; after a hang, those that did not end are."""
        for rank in self._hung:
            pid = self._processes[rank].pid
            sys.stderr.write(
                f"error: the run makes no progress: rank {rank} (process {pid}) is stopped; all ranks were"
                " ended\n"
            )
        if self._hung:
            return 1, self._hung
        failures = {rank: code for rank, code in sorted(codes.items()) if code}
        if not failures:
            return 0, []
        if 2 in failures.values():
            return 2, []
        if HANG_EXIT_CODE in failures.values():
            return 1, [rank for rank in range(len(self._processes)) if rank not in codes]
        if LOST_HELPER_EXIT_CODE in failures.values():
            return 1, []
        causes = {rank: code for rank, code in failures.items() if code != LOST_PEER_EXIT_CODE} or failures
        for rank, code in causes.items():
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
            pid = self._processes[rank].pid
            sys.stderr.write(f"error: rank {rank} (process {pid}) {how}; all ranks were stopped\n")
        return 1, list(causes)

    def _kill(self) -> None:
        """Ends every process of the ranks' sessions, loaders and what the user's code started included."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()


@contextmanager
def _keep_copies(folder: Path, replicates: bool) -> Iterator[None]:
    """Keeps copies of checkpoints for the ranks, if the run asks for it."""
    if not replicates:
        yield
        return
    with CopyKeeper(folder / "copies") as keeper:
        os.environ[COPIES_VARIABLE] = str(keeper.path)
        try:
            yield
        finally:
            del os.environ[COPIES_VARIABLE]


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
