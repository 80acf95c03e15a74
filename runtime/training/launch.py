"""Starts and ends the processes of a run: the entry of each rank under torchrun, and the launcher that `secc
run` calls.

A rank exits with 0; with 2 after a UserError, which only one rank prints; with `LOST_PEER_EXIT_CODE`,
silently, if another rank has gone, because that rank is the cause; else with 1 and a traceback. The launcher
runs torchrun's agent in this process and turns the ranks' exit codes into one message.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from secc.runtime.errors import UserError
from secc.runtime.host.child_processes import die_with_parent
from secc.runtime.plan.plan_file import load_plan
from secc.runtime.training.emulation import emulate_rank
from secc.runtime.training.machine_check import check_machine
from secc.runtime.training.options import RunOptions, parse_options

LOST_PEER_EXIT_CODE = 75  # of a rank that lost its connection to another rank
_SHUTDOWN_GRACE_S = 10  # from the first failure until the ranks are killed
_ENVIRONMENT_DEFAULTS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
_STORE_TIMEOUT = timedelta(seconds=5)


def main(train: Callable[[RunOptions], None]) -> int:
    """The entry of a rank's file under torchrun: calls `train` with the options of the command line. Returns
    0, or exits the process."""
    die_with_parent()
    try:
        options = parse_options(sys.argv[1:])
        if options.emulate is not None:
            emulate_rank(Path(sys.argv[0]).resolve().parent.parent, options)
        else:
            train(options)
        return 0
    except UserError as error:
        _report_once(error)
        code = 2
    except SystemExit:
        raise
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:
        code = LOST_PEER_EXIT_CODE if is_lost_peer(error) else 1
        if code == 1:
            sys.stderr.write(f"rank {os.environ.get('RANK', '0')}:\n{traceback.format_exc()}")
        else:
            time.sleep(1.0)  # so that the launcher sees the rank that caused it first
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no cleanup: it would wait for ranks and loaders that may be gone


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception only reports a broken connection to another rank."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    broken = any(sign in text for sign in ("gloo", "closed by peer", "reset by peer"))
    return isinstance(error, RuntimeError) and broken and "Timed out" not in text


def _report_once(error: UserError) -> None:
    """Prints the message on one rank: the first to register in the store of torchrun's agent."""
    store = _connect_agent_store()
    first = os.environ.get("RANK", "0") == "0" if store is None else store.add("secc/error", 1) == 1
    if first:
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    if store is not None and first:
        store.set("secc/error/printed", "1")
    elif store is not None:
        with suppress(RuntimeError):  # the printing rank has exited; the launcher reports that
            store.wait(["secc/error/printed"], _STORE_TIMEOUT)


def _connect_agent_store() -> Any:
    """Returns the store of torchrun's agent, which outlives the ranks; None under another launcher."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    try:
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host, int(port), is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False
        )
    except RuntimeError:
        return None


def run_plan(directory: str | Path, arguments: Sequence[str] = ()) -> int:
    """Trains the plan in `directory` with all its ranks on this machine, through torchrun's agent;
    `arguments` are those of run.py.

    Returns 0; 2 after a UserError on the ranks, which has been printed; 1 if a rank died, after a message
    that names it; 128 + n if signal n ended the run. Leaves no process behind. Raises UserError for a plan or
    options that cannot be read, and for a machine without the plan's devices.
    """
    directory = Path(directory).resolve()
    options, plan = parse_options(arguments), load_plan(directory)
    if options.emulate is None:
        check_machine(plan, range(plan.world_size))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.world_size,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        shutdown_timeout=_SHUTDOWN_GRACE_S,
        logs_specs=DefaultLogsSpecs(),
    )
    with _silence_agent(), rank_environment(), _restore_signals():
        try:
            elastic_launch(config, sys.executable)(str(directory / "run.py"), *arguments)
        except ChildFailedError as error:
            return _exit_code(error.failures)
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


def _exit_code(failures: dict[int, ProcessFailure]) -> int:
    """Returns the exit code of the launcher, after printing which rank was the cause, unless a rank has
    printed a message.

    The agent ends the remaining ranks with SIGTERM; these, and ranks that lost a peer, are not the cause.
    """
    if any(f.exitcode == 2 for f in failures.values()):
        return 2
    causes = {
        rank: f for rank, f in failures.items() if f.exitcode not in (LOST_PEER_EXIT_CODE, -signal.SIGTERM)
    } or failures
    for rank, failure in sorted(causes.items()):
        code = failure.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        sys.stderr.write(f"error: rank {rank} (process {failure.pid}) {how}; all ranks were stopped\n")
    return 1


@contextmanager
def _silence_agent() -> Iterator[None]:
    """Disables logging: torchrun's agent would repeat what the launcher prints."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


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


@contextmanager
def _restore_signals() -> Iterator[None]:
    """Restores the signal handlers, which the agent replaces."""
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {s: signal.getsignal(s) for s in handled}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
