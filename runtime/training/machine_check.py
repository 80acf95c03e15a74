"""Compares the devices and the memory that a plan needs with those of this machine, before anything is
loaded: a rank without its GPU would compute on the CPU for minutes, until the machine has no memory left.
"""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from secc.runtime.errors import UserError
from secc.runtime.plan.schema import Plan

GIB = 1 << 30
_OTHER_MACHINE_REMEDY = (
    "start it on the plan's cluster with launch.sh or slurm.sbatch, compile for this machine with --cluster"
    " local, or try it here with `secc run PLAN/ --emulate`"
)


def check_machine(plan: Plan, ranks: Collection[int], share_gpus: bool = False) -> None:
    """Raises UserError if this machine lacks GPUs for the plan's `ranks` that run here (with `share_gpus`,
    has none), or, if these run on the CPU, memory."""
    kind, available = gpu_kind_of(plan), _host_memory() / GIB
    on_host = sum(s.host_gib for s in plan.sections for rank in ranks if rank in s.mesh.ranks)
    if kind:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found < (1 if share_gpus else len(ranks)):
            raise UserError(
                f"the plan needs {len(ranks)} {kind} GPU{'s' if len(ranks) > 1 else ''} on this machine, "
                f"which has {found or 'none'}",
                remedy=_OTHER_MACHINE_REMEDY,
            )
        if on_host > available:
            raise UserError(
                f"the plan keeps {on_host:.3g} GiB in this machine's memory for {len(ranks)} ranks, which has"
                f" {available:.3g} GiB",
                remedy="compile with the host memory of its nodes in a cluster file, or with --set"
                " SECTION.offload=none",
            )
        return
    needed = sum(memory_of_rank(plan, rank) for rank in ranks) + on_host
    if needed > available:
        raise UserError(
            f"the plan needs {needed:.3g} GiB of memory for {len(ranks)} ranks on this machine, which has"
            f" {available:.3g} GiB",
            remedy="compile it for more machines, or with --set SECTION.sharding=zero3 or .recompute=full",
        )


def check_gpu_memory(plan: Plan, ranks: Collection[int], device: torch.device) -> None:
    """Raises UserError if the plan needs more memory on `ranks`, which compute on one GPU, than it has."""
    if device.type != "cuda":
        return
    needed = sum(memory_of_rank(plan, rank) for rank in ranks)
    properties = torch.cuda.get_device_properties(device)
    if needed * GIB > properties.total_memory:
        raise UserError(
            f"the plan needs {needed:.3g} GiB of memory on rank{'s' if len(ranks) > 1 else ''}"
            f" {', '.join(map(str, ranks))}, but the {properties.name} there has"
            f" {properties.total_memory / GIB:.3g} GiB",
            remedy="compile for this kind of device: secc compile --cluster",
        )


def memory_of_rank(plan: Plan, rank: int) -> float:
    """Returns the GiB that a rank needs. Each of its sections says it for all that share the rank."""
    return max((s.memory_gib for s in plan.sections if rank in s.mesh.ranks), default=0.0)


def gpu_kind_of(plan: Plan) -> str:
    """Returns the kinds of the plan's devices if all are GPUs, else ""."""
    groups = plan.cluster.get("groups") or [plan.cluster]
    devices = [group.get("device", {}) for group in groups]
    if not all(device.get("backend") == "cuda" for device in devices):
        return ""
    return " or ".join(dict.fromkeys(device["kind"] for device in devices))


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
