"""Runs ranks as forked processes that talk over gloo on a free port, each with a time limit; nothing is left
behind.

Forking saves the seconds that importing torch takes in every process. What a rank's function returns comes
back through a file.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(world_size: int, target: Callable[[int], Any], limit_s: float = LIMIT_S) -> list[Any]:
    """`target(rank)` in one process for each rank. Returns what they return; raises if one fails or takes too
    long."""
    context, port = multiprocessing.get_context("fork"), free_port()
    with tempfile.TemporaryDirectory() as results:
        files = [Path(results) / str(rank) for rank in range(world_size)]
        args = [(target, rank, world_size, port, files[rank]) for rank in range(world_size)]
        processes = [context.Process(target=_enter, args=a) for a in args]
        for process in processes:
            process.start()
        try:
            _wait(processes, time.monotonic() + limit_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [torch.load(file, weights_only=False) for file in files]


def run_plan_file(directory: Path, *arguments: str) -> Callable[[int], int]:
    """A target that runs the plan's run.py with `arguments`, as torchrun does, and returns its exit code."""

    def target(rank: int) -> int:
        enter_plan(directory, arguments)
        try:
            runpy.run_path(str(directory / "run.py"), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return target


def enter_plan(directory: Path, arguments: Sequence[str] = ()) -> None:
    """Make this process one that was started as `run.py ARGUMENTS` in a plan directory."""
    sys.argv = ["run.py", *arguments]
    sys.path.insert(0, str(directory))


def _enter(target: Callable[[int], Any], rank: int, world_size: int, port: int, result: Path) -> None:
    local = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_PORT": port,
    }
    os.environ.update(
        {name: str(value) for name, value in local.items()}, MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo"
    )
    code = 1
    try:
        torch.save(target(rank), result)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(processes: Sequence[Any], deadline: float) -> None:
    while any(p.is_alive() for p in processes):
        failed = [rank for rank, p in enumerate(processes) if p.exitcode not in (0, None)]
        if failed:
            time.sleep(0.5)  # the others may say why
            raise AssertionError(f"ranks {failed} failed")
        if time.monotonic() > deadline:
            raise TimeoutError("the ranks did not end in time")
        time.sleep(0.02)
    failed = [rank for rank, p in enumerate(processes) if p.exitcode != 0]
    if failed:
        raise AssertionError(f"ranks {failed} failed")
