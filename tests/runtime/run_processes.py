"""The processes of a run that a test started as a user would: which there are, where they listen, and waiting
for them."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

LAUNCH = (
    "import sys; from secc.runtime.training.supervisor import run_plan;"
    " sys.exit(run_plan(sys.argv[1], sys.argv[2:]))"
)


def start(*command: str, **environment: str) -> subprocess.Popen[str]:
    """Starts Python with `command`; its messages can be read from stderr."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()} | environment,
    )


def start_run(plan: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts the launcher of a plan."""
    return start("-c", LAUNCH, str(plan), *arguments)


def ranks_of(plan: Path) -> Iterator[tuple[int, str]]:
    """Yields (process, rank) of every process that runs the plan's run.py, including loaders."""
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            if str(plan / "run.py").encode() in command:
                variables = (entry / "environ").read_bytes().split(b"\0")
                environment = dict(v.split(b"=", 1) for v in variables if b"=" in v)
                yield int(entry.name), environment.get(b"RANK", b"").decode()
        except OSError:
            continue


def process_of_rank(plan: Path, rank: int) -> int:
    """Returns the process of a rank itself, which is older than its loaders."""
    return min(pid for pid, name in ranks_of(plan) if name == str(rank))


def loader_of_rank(plan: Path, rank: int) -> int:
    """Returns the process that loads a rank's samples."""
    return helper_of_rank(plan, rank, "secc-loader")


def helper_of_rank(plan: Path, rank: int, helper: str) -> int:
    """Returns a process of a rank by its name in lists of processes."""
    processes = [pid for pid, name in ranks_of(plan) if name == str(rank)]
    return next(pid for pid in processes if Path(f"/proc/{pid}/comm").read_text().strip() == helper)


def wait_until(condition: Callable[[], Any], process: subprocess.Popen[str] | None = None) -> None:
    """Waits for a condition, for minutes at most; the process must not end meanwhile."""
    deadline = time.monotonic() + 150
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps_of(logs: Path) -> list[dict[str, Any]]:
    """Returns the lines of a metrics file; [] if there is none yet."""
    path = logs / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(plan: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Waits until a run has trained a step."""
    wait_until(lambda: any(line["step"] >= step for line in steps_of(plan / "logs")), process)


def listening_addresses(processes: Iterable[int]) -> set[str]:
    """Returns the local addresses at which processes listen for TCP connections."""
    inodes = {link for pid in processes for link in _open_links(pid)}
    return {
        address
        for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6"))
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        for local, _, state, *rest in [line.split()[1:]]
        if state == "0A" and f"socket:[{rest[5]}]" in inodes
        for address in [_decode_address(family, local.partition(":")[0])]
    }


def _open_links(pid: int) -> Iterator[str]:
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            yield os.readlink(descriptor)
    except OSError:
        return


def _decode_address(family: int, digits: str) -> str:
    words = (int(digits[i : i + 8], 16) for i in range(0, len(digits), 8))
    return socket.inet_ntop(family, b"".join(struct.pack("<I", word) for word in words))
