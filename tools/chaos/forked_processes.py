"""Launchers and ranks that are forked from a process that has imported everything, in place of new Python
processes: a case then costs a tenth of the processor's time.

A forked rank runs the plan's `run.py` with the arguments, the environment, the session and the open files
that an executed one would have; only what happens before torch is imported is left out. So cases at a start
or restart, and some of the others, execute their ranks.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing.process
import multiprocessing.util
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import secc.runtime
from secc.runtime.errors import UserError
from secc.runtime.host.parent_death import die_with_parent
from secc.runtime.training import rank_group, supervisor
from tools.chaos.moments import CASE_VARIABLE, watch_for_moment

_MAIN_PROCESS = multiprocessing.current_process()
_MOST_FILES = 4096  # that a process has open


def import_runtime() -> None:
    """Imports all that a rank may import, so that forked processes have it."""
    for module in pkgutil.walk_packages(secc.runtime.__path__, "secc.runtime."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def fork_launcher(
    plan: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    messages: Path,
    executes: Callable[[Mapping[str, str]], bool],
    replan: supervisor.Replanner,
) -> int:
    """Starts a launcher whose output goes to `messages`, and returns its process id. `executes` tells from
    a rank's environment whether it is executed."""
    _flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    die_with_parent(parent)
    _become(environment, messages)

    def start_rank(command: list[str], env: Mapping[str, str], **options: Any) -> Any:
        if executes(env):
            return subprocess.Popen(command, env=env, **options)
        return _ForkedRank(command, env)

    class Processes:
        """In the place of the module `subprocess`."""

        Popen = staticmethod(start_rank)

    rank_group.subprocess = Processes  # pyright: ignore
    _leave(lambda: supervisor.run_plan(plan, arguments, replan))


class _ForkedRank:
    """A rank's process, with what the launcher uses of `subprocess.Popen`."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        _flush()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            _become(environment, None)
            sys.argv = command[1:]
            _leave(_run_rank)

    def poll(self) -> int | None:
        """Returns the exit code, None while the process runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Waits for the end of the process."""
        code = self._wait(0)
        assert code is not None
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, if the process has not been waited for."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _run_rank() -> int:
    if os.environ.get(CASE_VARIABLE):
        watch_for_moment()
    sys.path[:0] = [str(Path(sys.argv[0]).parent)]
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


def _become(environment: Mapping[str, str], messages: Path | None) -> None:
    """Gives this forked process what an executed one has."""
    if messages is not None:
        file = os.open(messages, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
    os.closerange(3, _MOST_FILES)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):  # captured streams of a test are closed now
        setattr(sys, name, open(descriptor, "w", buffering=1, closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    atexit._clear()  # pyright: ignore  # what the forking process would do at its own end
    registry: Any = weakref.finalize
    registry._registry.clear()
    registry._registered_with_atexit = False
    atexit.register(multiprocessing.util._exit_function)  # pyright: ignore
    process: Any = multiprocessing.process  # as of a process that multiprocessing has not started
    process._current_process, process._children = _MAIN_PROCESS, set()
    multiprocessing.util._finalizer_registry.clear()  # pyright: ignore
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(action: Callable[[], int]) -> NoReturn:
    """Ends this process as Python ends after `action`, without returning to the code that forked it."""
    code: Any = 1
    try:
        code = action()
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        code = 2
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # pyright: ignore
        atexit._run_exitfuncs()  # pyright: ignore
        _flush()
        os._exit(code)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
