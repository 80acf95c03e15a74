"""Hides from the user's code that it runs on one of several ranks.

Libraries that stream samples look at the launcher's variables and then read a part of the stream in each
rank. Every rank has to see all samples in the same order here, because which rank trains a sample is decided
later, from the sizes of the whole global batch. In the same way a learning rate may depend on the number of
ranks, and a module that finds a process group sums a statistic over all ranks (centres of DINO, codebooks,
counts of boxes): in one process it does not, and what ranks compute here is what one process computes.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

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
_depth = [0]  # of contexts `hidden_ranks` that are open; more than 0 also after `hide_ranks`
_group_depth = [0]  # of all contexts that are open


def hide_ranks() -> None:
    """Makes this process look like the only one of a run, for as long as it lives."""
    _depth[0] += 1
    _group_depth[0] += 1
    os.environ.update(_single_rank_variables())


@contextmanager
def hidden_process_group() -> Iterator[None]:
    """Lets torch.distributed say that there is no process group. Other threads of Python are not concerned,
    nor are collectives with a group. `make_groups_hideable` must have been called before."""
    _group_depth[0] += 1
    try:
        yield
    finally:
        _group_depth[0] -= 1


def make_groups_hideable() -> None:
    """Replaces is_initialized, get_rank and get_world_size of torch.distributed by functions that answer as
    without a process group inside `hidden_process_group`. To be called before user code is imported, since
    that may import these functions by name."""
    if not dist.is_available() or hasattr(dist.is_initialized, "__wrapped__"):
        return
    dist.is_initialized = _hideable(dist.is_initialized, lambda: False)
    dist.get_rank = _hideable(dist.get_rank, _raise_uninitialized)
    dist.get_world_size = _hideable(dist.get_world_size, _raise_uninitialized)


def _hideable(function: Callable[..., Any], answer_without_group: Callable[[], Any]) -> Callable[..., Any]:
    """Returns `function`, with the other answer where the process group is hidden."""

    @functools.wraps(function)
    def ask(*args: Any, **kwargs: Any) -> Any:
        hides = _group_depth[0] and not (args or kwargs) and _is_thread_of_steps()
        return answer_without_group() if hides else function(*args, **kwargs)

    return ask


def _is_thread_of_steps() -> bool:
    """Whether this is the main thread or one of autograd's, which Python has not started."""
    thread = threading.current_thread()
    return thread is threading.main_thread() or isinstance(thread, threading._DummyThread)  # pyright: ignore[reportPrivateUsage]


def _raise_uninitialized() -> None:
    raise ValueError(
        "Default process group has not been initialized, please make sure to call init_process_group."
    )


@contextmanager
def hidden_ranks() -> Iterator[None]:
    """Makes this process look like the only one of a run: `hidden_process_group`, and the variables of
    launchers."""
    if _depth[0]:
        yield
        return
    changed = _single_rank_variables()
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    _depth[0] += 1
    try:
        with hidden_process_group():
            yield
    finally:
        _depth[0] -= 1
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def are_ranks_hidden() -> bool:
    """Whether this process looks like the only one of a run now, by the variables of launchers, too."""
    return _depth[0] > 0


def _single_rank_variables() -> dict[str, str]:
    return _ALWAYS | {name: value for name, value in _IF_SET.items() if name in os.environ}
