"""How the ranks of a run find each other: one key-value store for each attempt of a run.

- Started by secc's launcher, all ranks are on one machine and meet in a file of a folder that only this user
  may enter (c10d's FileStore). Nothing listens, so a stranger can neither join nor read nor write.
- Started by secc's launchers on several nodes, they meet in a store of node 0's launcher, which asks for a
  secret and listens on the interface of the endpoint only (`node_store`).
- Started by torchrun, ranks use its agent's TCP store, which listens on every interface of the first node and
  asks for no secret. Keys carry the run's id and the attempt, so that a rank left over from another run, or
  from an earlier attempt, cannot join.
- Started otherwise, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, rank 0 listens on the interface
  of MASTER_ADDR only. If the process that starts it has joined a process group there, as Ray Train's workers
  have, ranks use that group's store.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from secc.runtime.training.node_store import ENDPOINT_VARIABLE, RUN_VARIABLE, open_node_store

STORE_VARIABLE = "SECC_STORE"  # path of the store's file, from secc's launcher
ATTEMPT_VARIABLE = "SECC_ATTEMPT"  # restarts so far by secc's launcher, launch.sh or Slurm
_c10d: Any = dist  # torch does not declare its stores
_MAX_PAUSE_S = 60  # before a restart
_JOIN_TIMEOUT = timedelta(minutes=10)
_ASK_S = 0.1


def attempt_number() -> int:
    """Returns how often the ranks of this run were started again after a failure."""
    return int(os.environ.get(ATTEMPT_VARIABLE) or 0) + torchrun_restarts()


def attempt_name() -> str:
    """Returns what tells this attempt from others of this run and, on several nodes, of its launchers."""
    return f"{os.environ.get(RUN_VARIABLE, '')}/{attempt_number()}"


def torchrun_restarts() -> int:
    """Returns how often torchrun's agent, if there is one, has started this rank again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def agree_on_restarts() -> None:
    """Makes all ranks of torchrun on several nodes count restarts alike; does nothing elsewhere. An agent
    counts the failures of its own node only, none if it hears of another node's before its own ranks end. All
    ranks have to know a restart as one, and keys of the ranks' stores carry its number.

    In the agents' store the number is one that no attempt had. Where agents have none (etcd), the ranks meet
    in a store that rank 0 keeps for this, and take the highest count of all nodes.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    is_alone = int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) == world_size
    if is_alone or "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return
    if has_torchrun_agent():
        count = _agree_in(connect_to(*_master_address()), rank, world_size)
    elif rank == 0:
        store = listen_on(*_master_address())
        count = _agree_in(store, rank, world_size)
        store.wait([f"done/{other}" for other in range(1, world_size)])
        del store  # the server ends, and its address is free for the store of the attempt
    else:
        store = connect_to(*_master_address())
        count = _agree_in(store, rank, world_size)
        with suppress(RuntimeError):
            store.set(f"done/{rank}", "1")
            while True:  # so that this rank does not take it for the store of the attempt
                store.check(["name"])
                time.sleep(_ASK_S)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(count)


def _agree_in(agents: Any, rank: int, world_size: int) -> int:
    """Returns the number of restarts that all ranks take from a store.

    Rank 0 writes a random name into the store, waits until each rank has answered under that name with its
    process and its count, and confirms the processes with a count above that of all attempts before. So a
    rank that reads the name of an attempt before waits for the next name.
    """
    store = _c10d.PrefixStore("secc/restarts", agents)
    process, count = secrets.token_hex(8), torchrun_restarts()
    if rank == 0:
        name = secrets.token_hex(8)
        store.set("name", name)
        answers = [json.loads(store.get(f"{name}/{other}")) for other in range(1, world_size)]
        before = int(store.get("count")) if store.check(["count"]) else -1
        count = max([count, before + 1, *(answer[1] for answer in answers)])
        store.set("count", str(count))
        store.set(f"{name}/all", json.dumps([count, [answer[0] for answer in answers]]))
        return count
    while True:
        name = store.get("name").decode()
        store.set(f"{name}/{rank}", json.dumps([process, count]))
        if store.check([f"{name}/all"]):
            agreed, processes = json.loads(store.get(f"{name}/all"))
            if processes[rank - 1] == process:
                return agreed
        time.sleep(_ASK_S)


def restart_pause(failures: int) -> int:
    """Returns the seconds to wait after the given number of failures in a row."""
    return min(_MAX_PAUSE_S, 2 ** (failures - 1))


def is_joinable() -> bool:
    """Tells whether the environment says how to meet the other ranks."""
    return any(name in os.environ for name in (STORE_VARIABLE, ENDPOINT_VARIABLE, "MASTER_ADDR"))


def open_store(rank: int, plan_hash: str) -> Any:
    """Joins the store of this run's attempt."""
    path = os.environ.get(STORE_VARIABLE)
    if path:
        store: Any = _c10d.FileStore(path, -1)
        store.set_timeout(_JOIN_TIMEOUT)
        return store
    if ENDPOINT_VARIABLE in os.environ:
        return open_node_store(attempt_number(), _JOIN_TIMEOUT)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    # A store that rank 0 keeps itself is a new one for each attempt.
    attempt = torchrun_restarts() if has_torchrun_agent() else ""
    return _c10d.PrefixStore(f"secc/{run}/{plan_hash}/{attempt}", _open_tcp_store(rank))


def has_torchrun_agent() -> bool:
    """Tells whether torchrun's agent has started this rank and keeps a store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "MASTER_ADDR" in os.environ


def connect_agent_store(timeout: timedelta, restarts: int | None = None) -> Any:
    """Returns the store that outlives this rank: the launcher's file, or that of torchrun's agent; None if
    rank 0 keeps the store itself. `restarts` by the agent: those so far, unless an earlier attempt is
    meant."""
    if STORE_VARIABLE in os.environ:
        store: Any = _c10d.FileStore(os.environ[STORE_VARIABLE], -1)
        store.set_timeout(timeout)
        return store
    if ENDPOINT_VARIABLE in os.environ:
        return open_node_store(attempt_number(), timeout)
    if not has_torchrun_agent():
        return None
    try:
        agents = connect_to(*_master_address(), timeout)
    except RuntimeError:
        return None
    return _c10d.PrefixStore(f"secc/{torchrun_restarts() if restarts is None else restarts}", agents)


def listen_on(address: str, port: int = 0) -> Any:
    """Returns the server of a TCP store that listens on one interface instead of on all of them."""
    family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(where)
    listener.listen(1024)
    port = listener.getsockname()[1]
    return _c10d.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_JOIN_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def connect_to(address: str, port: int, timeout: timedelta = _JOIN_TIMEOUT) -> Any:
    """Returns a client of the TCP store at an address. Raises RuntimeError if there is none."""
    return _c10d.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)


def _open_tcp_store(rank: int) -> Any:
    if rank == 0 and not has_torchrun_agent():
        try:
            return listen_on(*_master_address())
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # The launcher (Ray Train) has made a process group, and its store listens at this address.
    return connect_to(*_master_address())


def _master_address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
