"""The part of `tools.chaos` that lives in the processes of a run: it waits for the moment of a case and does
what the case says, at that very point of the code.

Every process of the run calls `watch_for_moment`: an executed one as Python starts, before anything heavy is
imported, a forked one before `run.py`. Where a function that stands for the moment is defined, it is wrapped
as its module is imported. One process of the run, the first that comes to the moment as often as the case
says, breaks something, once in all starts of the run: it claims the file `fired`.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

CASE_VARIABLE = "SECC_CHAOS_CASE"  # of the run's processes: a Case as JSON
FIRED_FILE, FIRST_FILE = "fired", "first"
DISK_FULL_S = 0.4
_RUNTIME = "secc.runtime"
# The functions that stand for a moment: module, class or "", function. `rename` and `latest` are calls of os.
_FUNCTIONS = {
    "start": ("training.rank_context", "RankContext", "__init__"),
    "restart": ("training.rank_context", "RankContext", "__init__"),
    "load": ("data.data_plane", "DataPlane", "load_micro_batch"),
    "forward": ("training.engine", "_StepExecution", "run_forward"),
    "message": ("comm.p2p_channels", "Transport", "send"),
    "reduce": ("parameters.gradient_reduction", "GradientReducer", "finish_reduction"),
    "optimizer": ("training.trainer", "Trainer", "_step_optimizer"),
    "copy": ("parameters.checkpoint_writer", "BackgroundWriter", "write_entries"),
    "write": ("parameters.checkpoint_writer", "", "_write_part"),
    "rename": ("parameters.checkpoint_folder", "os", "rename"),
    "latest": ("parameters.checkpoint_folder", "os", "replace"),
}
_ENDINGS = {"rename": ".incomplete", "latest": ".latest.tmp"}  # of the path that is renamed
MOMENTS = tuple(_FUNCTIONS)
IN_WRITER = ("write", "rename", "latest")


@dataclass(frozen=True)
class Case:
    """What is broken, where and when: in the process `process` of `rank`, when the rank or its writer comes
    to `moment` for the time number `count` in a process; `delay_s` after a (re)start. The process "node" is
    the rank with all its helpers. `plan` names the plan, `spawn` says how ranks are started ("exec" as new
    Python processes, "fork" from one that has imported everything), and `on_loss` is the run's option."""

    number: int
    fault: str
    process: str
    moment: str
    plan: str
    rank: int
    count: int
    delay_s: float
    spawn: str
    on_loss: str


def watch_for_moment() -> None:
    """Arms the case in the environment, if this is the process of a rank."""
    if "RANK" not in os.environ:
        return
    about = json.loads(os.environ[CASE_VARIABLE])
    folder = Path(about.pop("folder"))
    case = Case(**about)
    attempt, rank = int(os.environ.get("SECC_ATTEMPT", "0")), int(os.environ["RANK"])
    if case.moment == "restart" and attempt == 0:
        if rank == 0:
            _wrap_functions("forward", _Breaker(case, folder, is_first=True))
    elif rank == case.rank and (case.moment != "start" or attempt == 0):
        _wrap_functions(case.moment, _Breaker(case, folder, is_first=False))


class _Breaker:
    """Counts how often this process comes to the moment, and breaks what the case says. `is_first`: kills
    this rank, so that the run restarts."""

    def __init__(self, case: Case, folder: Path, is_first: bool) -> None:
        self._case, self._folder, self._is_first, self._count = case, folder, is_first, 0

    def come_to_moment(self) -> None:
        """Called at the moment."""
        self._count += 1
        if self._is_first:
            if self._count >= 20 and _claim(self._folder / FIRST_FILE):
                os.kill(os.getpid(), signal.SIGKILL)
        elif self._case.moment in ("start", "restart"):
            threading.Thread(target=self._break_later, daemon=True).start()
        elif self._count >= self._case.count:
            self._break()

    def _break_later(self) -> None:
        time.sleep(self._case.delay_s)
        while not self._break():
            time.sleep(0.05)

    def _break(self) -> bool:
        """Breaks what the case says; returns False if there is no such process or file yet."""
        case = self._case
        victims = _find_processes(case.process)
        file = _pick_file(self._folder, case.number) if case.fault == "TRUNCATE" else None
        if not victims or (case.fault == "TRUNCATE" and file is None):
            return False
        if not _claim(self._folder / FIRED_FILE):
            return True
        if case.fault == "DISK_FULL":
            full = (0, resource.RLIM_INFINITY)
            before = {v: resource.prlimit(v, resource.RLIMIT_FSIZE, full) for v in victims}
            threading.Timer(DISK_FULL_S, _lift_limits, (before,)).start()
        elif case.fault == "DROP":
            _drop_connections()
        else:
            if file is not None:
                os.truncate(file, file.stat().st_size // 2)
            for victim in victims:  # this process last
                os.kill(victim, signal.SIGKILL if file is not None else signal.Signals[case.fault])
        return True


def _claim(file: Path) -> bool:
    """Makes a file with the time; returns False if it is there already."""
    try:
        with file.open("x") as claimed:
            claimed.write(str(time.monotonic()))
        return True
    except FileExistsError:
        return False


def _find_processes(name: str) -> list[int]:
    """Returns the processes of this rank with the name, this one last; an empty list if there is none."""
    is_helper = _process_name(os.getpid()).startswith("secc-")
    rank = os.getppid() if is_helper else os.getpid()
    if name == "rank":
        return [rank]
    if name == "launcher":
        parent = _parent_of(rank)
        return [] if parent is None else [parent]
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    helpers = [pid for pid in pids if _parent_of(pid) == rank]
    if name == "node":
        return sorted([rank, *helpers], key=lambda pid: pid == os.getpid())
    return [pid for pid in helpers if _process_name(pid) == f"secc-{name}"][:1]


def _process_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _pick_file(folder: Path, seed: int) -> Path | None:
    """Returns a file of the newest checkpoint, if there is another one to fall back to."""
    *before, newest = [None, *sorted(folder.glob("saved/step_????????"))]
    if newest is None or len(before) < 2:
        return None
    return random.Random(seed).choice(sorted(newest.iterdir()))


def _lift_limits(before: Mapping[int, tuple[int, int]]) -> None:
    for process, limits in before.items():
        with suppress(OSError):
            resource.prlimit(process, resource.RLIMIT_FSIZE, limits)


def _drop_connections() -> None:
    """Shuts this process's connections to other ranks."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(name)))
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _wrap_functions(moment: str, breaker: _Breaker) -> None:
    """Lets the functions of a moment tell the breaker that they are called, once their module is imported."""
    module, owner, name = _FUNCTIONS[moment]

    def wrap(imported: ModuleType) -> None:
        holder: Any = getattr(imported, owner) if owner else imported
        function: Callable[..., Any] = getattr(holder, name)

        @wraps(function)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if moment not in _ENDINGS or str(arguments[0]).endswith(_ENDINGS[moment]):
                breaker.come_to_moment()
            return function(*arguments, **named)

        setattr(holder, name, wrapped)

    full_name = f"{_RUNTIME}.{module}"
    if full_name in sys.modules:  # of a forked process
        wrap(sys.modules[full_name])
    else:
        sys.meta_path.insert(0, _WrappingFinder(full_name, wrap))


class _WrappingFinder:
    """Finds one module as Python does, and calls `after` once it has been imported."""

    def __init__(self, module: str, after: Callable[[ModuleType], None]) -> None:
        self._module, self._after = module, after

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the module's spec; None for all other modules."""
        if name != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            self._after(module)

        spec.loader.exec_module = execute_and_wrap
        return spec
