"""Runs rows in parallel processes, each with limits of time and memory.

Processes are forked from this one, which has imported torch and transformers, so that a row costs what its
compilation costs. Limits are of processor time, so that a busy machine fails no row. A process that exceeds
its time says where it was, then is killed with all that it started.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tools import compare_training
from tools.census.row_check import Outcome, RowResult, check_row

GIB = 1 << 30
POLL_S = 0.05
LAST_WORDS_S = 0.5  # what a process has to print where it is
MOST_WAITING = 10  # wall-clock seconds for each second of processor time, before a row counts as stuck
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Limits:
    """Of a row: seconds of processor time of all its processes, GiB of data of each."""

    seconds: float = 400.0
    gib: float = 6.0


@dataclass
class _Running:
    name: str
    pid: int
    folder: tempfile.TemporaryDirectory[str]
    core: int
    started: float


def run_rows(tasks: Sequence[tuple[str, int]], jobs: int, limits: Limits) -> Iterator[RowResult]:
    """Checks rows (name, ranks of its run or 0), `jobs` at a time; yields results as they are done."""
    cores = sorted(os.sched_getaffinity(0))
    waiting, running = list(reversed(tasks)), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                busy = [r.core for r in running]
                core = min(cores, key=busy.count)
                running.append(_start(*waiting.pop(), core, limits))
            time.sleep(POLL_S)
            for process in list(running):
                if (result := _poll(process, limits)) is not None:
                    running.remove(process)
                    process.folder.cleanup()
                    yield result
    finally:
        for process in running:
            _kill(process)


def _start(name: str, ranks: int, core: int, limits: Limits) -> _Running:
    folder = tempfile.TemporaryDirectory()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            _run_here(name, ranks, Path(folder.name), core, limits)
        except BaseException:  # of a test, or out of memory
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(0)
    return _Running(name, pid, folder, core, time.monotonic())


def _run_here(name: str, ranks: int, folder: Path, core: int, limits: Limits) -> None:
    """In the forked process: checks the row and writes its result."""
    os.setsid()
    os.sched_setaffinity(0, {core})  # secc forks a worker for each core that it may use
    torch.set_num_threads(1)
    log = (folder / "log").open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.register(signal.SIGUSR1, (folder / "where").open("w"))
    most = int(limits.gib * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    (folder / "temporary").mkdir()
    compare_training.start_method = "fork"
    tempfile.tempdir = str(folder / "temporary")
    result = check_row(name, ranks)
    (folder / "result.new").write_text(json.dumps(result.as_dict()))
    (folder / "result.new").rename(folder / "result")


def _poll(process: _Running, limits: Limits) -> RowResult | None:
    """The result of a process that has ended or run out of time; None while it runs."""
    folder, seconds = Path(process.folder.name), time.monotonic() - process.started
    ended, status = os.waitpid(process.pid, os.WNOHANG)
    stuck = seconds > MOST_WAITING * limits.seconds
    if not ended and not stuck and (seconds < limits.seconds or _cpu_seconds(process.pid) < limits.seconds):
        return None
    if ended and (folder / "result").exists():
        _kill(process)  # what it may have started
        return result_from_dict(json.loads((folder / "result").read_text()))
    where = ""
    if not ended:
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(LAST_WORDS_S)
        where = (folder / "where").read_text()
        used = limits.seconds if not stuck else seconds
        message = f"not done after {used:.0f} s of {'wall-clock' if stuck else 'processor'} time"
    else:
        message = (
            f"the process ended with signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "no result"
        )
        where = (folder / "log").read_text()[-600:]
    _kill(process)
    family = process.name.partition("/")[0]
    return RowResult(process.name, family, Outcome.FAILED, message, where[:2000], seconds=round(seconds, 1))


def _cpu_seconds(session: int) -> float:
    """Processor time of the processes of a session, with that of their children that have ended."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            fields = (
                stat.read_text().rpartition(")")[2].split()
            )  # after the name: state, parent, group, session
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / TICKS


def _kill(process: _Running) -> None:
    """Kills a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, 0)


def result_from_dict(row: dict[str, object]) -> RowResult:
    """The inverse of `RowResult.as_dict`; other keys are left out."""
    known = {k: v for k, v in row.items() if k in RowResult.__dataclass_fields__}
    result = RowResult(**known)  # type: ignore[arg-type]
    result.outcome = Outcome(result.outcome)
    return result
