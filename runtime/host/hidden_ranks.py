"""Hides from the user's data code that it runs on one of several ranks.

Libraries that stream samples look at the launcher's variables and then read a part of the stream in each
rank. Every rank has to see all samples in the same order here, because which rank trains a sample is decided
later, from the sizes of the whole global batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# What torchrun sets: always there meanwhile, since code may ask for torch.distributed's rank without them.
_ALWAYS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# Of torchrun, Slurm, Open MPI and MPICH: changed where they are set.
_IF_SET = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "0",
    "ROLE_WORLD_SIZE": "1",
    "NODE_RANK": "0",
    "NNODES": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_NPROCS": "1",
    "SLURM_NNODES": "1",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMI_RANK": "0",
    "PMI_SIZE": "1",
}
_depth = [0]  # of contexts that are open; more than 0 also after `hide_ranks`


def hide_ranks() -> None:
    """Makes this process look like the only one of a run, for as long as it lives."""
    _depth[0] += 1
    os.environ.update(_single_rank_variables())


@contextmanager
def hidden_ranks() -> Iterator[None]:
    """Makes this process look like the only one of a run."""
    if _depth[0]:
        yield
        return
    changed = _single_rank_variables()
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    _depth[0] += 1
    try:
        yield
    finally:
        _depth[0] -= 1
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _single_rank_variables() -> dict[str, str]:
    return _ALWAYS | {name: value for name, value in _IF_SET.items() if name in os.environ}
