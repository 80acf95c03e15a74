"""A process group for ranks that share a GPU: every message travels through the host's memory, over gloo.

NCCL refuses two ranks on one GPU, and gloo sends from and receives into host memory only. This group copies a
GPU tensor to the host, lets gloo work there, and copies the result back when the operation is waited for. It
is slow, and made for trying a plan on a machine that has fewer GPUs than the plan has ranks: everything but
the transport runs as on a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

BACKEND_NAME = "host_staged"
# Operations of a process group and gloo's names for them; the first argument takes the results. PyTorch
# 2.13 calls some of them by other names than 2.11.
_OPERATIONS = {
    name: name
    for name in (
        "allgather", "_allgather_base", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base",
        "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter", "_reduce_scatter_base",
        "scatter", "send",
    )
} | {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}  # fmt: skip


class HostStagedWork:
    """An operation under way on host copies; `wait` copies its results back to where they belong."""

    def __init__(self, work: dist.Work, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work, self._copies = work, copies

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the operation is done; the results are ready on the current stream."""
        done = self._work.wait() if timeout is None else self._work.wait(timeout)
        for target, host in self._copies:
            target.copy_(host)
        self._copies = ()
        return bool(done)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def _source_rank(self) -> int:
        return self._work._source_rank()


class HostStagedGroup(dist.ProcessGroup):
    """A gloo group that takes tensors of any device; host tensors go to gloo as they are, unless `stage_all`
    asks for copies of them, too (which tests the copying without a GPU)."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, stage_all: bool = False) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stage_all = stage_all
        self._name = ""

    @property
    def group_name(self) -> str:
        """The name under which torch.distributed registers the group; the base class would ask a backend."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def barrier(self, *arguments: Any, **options: Any) -> dist.Work:
        """Waits on the host for all ranks; what they have put on their GPU's streams may still run."""
        return self._gloo.barrier()  # pyright: ignore[reportAttributeAccessIssue]

    def _run(self, operation: str, *arguments: Any) -> HostStagedWork:
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def to_host(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or (x.device.type == "cpu" and not self._stage_all):
                return x
            return copies.setdefault(id(x), (x, x.detach().to("cpu", copy=True)))[1]

        host_arguments = pytree.tree_map(to_host, arguments)
        work = getattr(self._gloo, operation)(*host_arguments)
        results = () if operation == "send" else pytree.tree_leaves(arguments[0])
        return HostStagedWork(work, [copies[id(x)] for x in results if id(x) in copies])


def _operation(gloo_name: str) -> Callable[..., HostStagedWork]:
    def run(self: HostStagedGroup, *arguments: Any) -> HostStagedWork:
        return self._run(gloo_name, *arguments)

    return run


for _name, _gloo_name in _OPERATIONS.items():
    setattr(HostStagedGroup, _name, _operation(_gloo_name))


def register_backend(stage_all: bool = False) -> str:
    """Makes the backend known to torch.distributed, once per process, and returns its name."""
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND_NAME,
            lambda store, rank, size, timeout: HostStagedGroup(store, rank, size, timeout, stage_all),
            devices=["cpu", "cuda"],
        )
    return BACKEND_NAME
