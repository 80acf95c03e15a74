"""Ranks of torchrun on several nodes count restarts alike, although agents count those of their own nodes."""

from __future__ import annotations

import os
import subprocess
import sys

from secc.runtime.training.rendezvous import listen_on

CODE = "from secc.runtime.training.rendezvous import *; agree_on_restarts(); print(torchrun_restarts())"
# Then rank 0 listens at the same address, and the other one joins it, as in the store of an attempt. Rank 0
# ends last, since its store ends with it.
MEETING = """
rank = int(os.environ["RANK"])
store = open_store(rank, "plan")
if rank == 0:
    store.set("at", "the attempt")
    store.get("joined")
else:
    store.get("at")
    store.set("joined", "by rank 1")
"""


def start_rank(rank: int, restarts: int, port: int, has_store: bool, code: str) -> subprocess.Popen[str]:
    variables = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": restarts}
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": str(has_store)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


def test_all_ranks_take_a_number_that_no_attempt_had() -> None:
    store = listen_on("127.0.0.1")
    # A failure on node 1, and one on node 0: each agent has counted its own.
    for own, agreed in (((0, 1), 1), ((1, 1), 2)):
        late = start_rank(1, own[1], store.port, True, CODE)  # finds the name of the attempt before
        ranks = [start_rank(0, own[0], store.port, True, CODE), late]
        counts = [int(rank.communicate(timeout=60)[0]) for rank in ranks]
        assert counts == [agreed, agreed]


def test_agents_without_a_store_leave_no_rank_behind() -> None:
    """As with etcd: the agent of node 0 starts its rank again when another node joins, and counts nothing."""
    listener = listen_on("127.0.0.1")
    port = listener.port
    del listener
    ranks = [start_rank(rank, rank, port, False, f"import os\n{CODE}\n{MEETING}") for rank in (0, 1)]
    counts = [int(rank.communicate(timeout=60)[0]) for rank in ranks]
    assert counts == [1, 1] and [rank.wait() for rank in ranks] == [0, 0]
