"""The ranks of one replica and the collectives among them.

A group sums and gathers plain tensors; gradients are the concern of `autograd_collectives`. Ranks of a run
use a process group; the numeric check of a mapping uses threads of one process.

All process groups that a plan may need are made when a run starts, also those of the subgroups to which
samples are dealt (`secc.runtime.plan.dealt_samples`). Making one at its first use is not safe: the default
group is bound to a GPU, so torch makes each new communicator with `ncclCommSplit`, a collective of all ranks
that `new_group(use_local_synchronization=True)` calls on members only, and ranks come to a subgroup at
different points of their programs. `split_group` makes all groups of one size in one collective, but on NCCL
only.

A rank is in one group of each size: a plan for 256 ranks (dp 8, tp 4, cp 8, any divisor of cp) has 296
groups, and each rank 5 of them; one for 128 ranks (dp 2, cp 32) has 94, and each rank 5. NCCL keeps buffers
on a device for each of these. With gloo, 16 processes on two busy cores made 15 groups in 0.15 s; what NCCL
takes, in seconds and in bytes, has not been measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from secc.runtime.plan.replica_routes import Ranks, cp_ranks_by_replica, ranks_by_replica
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import exchanges_tokens, synchronizes_norms

Wait = Callable[[], None]  # waits until a collective that was started has ended


class ReplicaGroup(Protocol):
    """A group of `size` ranks; this rank has number `index`."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks; may write it into `tensor`, which is contiguous and of any
        shape."""
        ...

    def start_all_reduce(self, tensor: torch.Tensor) -> Wait:
        """Starts to replace `tensor`, which is contiguous and of any shape, by its sum over all ranks;
        nothing may read it or write to it before the returned function has been called."""
        ...

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Concatenates the 1-D tensors of all ranks; `lengths` are their lengths."""
        ...

    def reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Sums a 1-D tensor over all ranks and returns this rank's part; `lengths` are the lengths of the
        parts."""
        ...

    def start_reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, Wait]:
        """Starts what `reduce_scatter` does. Returns the tensor that has this rank's part once the wait has
        been called."""
        ...

    def all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Sends the first `sent[0]` rows (along dim 0) to rank 0 and so on; returns `received[0]` rows of
        rank 0, then those of rank 1 and so on."""
        ...


class ReplicaProcessGroup:
    """A `ReplicaGroup` of processes; `handle` is torch's process group. `timed` makes the context in which
    each collective runs."""

    def __init__(self, ranks: Ranks, rank: int, group: Any) -> None:
        self.ranks, self.index, self.size, self.handle = ranks, ranks.index(rank), len(ranks), group
        self.timed: Callable[[], AbstractContextManager[None]] = nullcontext

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces `tensor`, of any shape, by its sum over all ranks, and returns it."""
        with self.timed():
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> Wait:
        """Starts to replace `tensor`, of any shape, by its sum over all ranks. NCCL runs it on a stream of
        its own, gloo in a thread; what the wait takes is the part that nothing hides."""
        work: Any = dist.all_reduce(tensor, group=self.handle, async_op=True)

        def wait() -> None:
            with self.timed():
                work.wait()

        return wait

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Concatenates the 1-D tensors of all ranks; `lengths` are their lengths."""
        longest = max(lengths)
        padded = (
            tensor
            if tensor.numel() == longest
            else torch.cat([tensor, tensor.new_zeros(longest - tensor.numel())])
        )
        parts = [torch.empty_like(padded) for _ in lengths]
        with self.timed():
            dist.all_gather(parts, padded, group=self.handle)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Sums a 1-D tensor over all ranks and returns this rank's part; `lengths` are the lengths of the
        parts."""
        own, wait = self.start_reduce_scatter(tensor, lengths)
        wait()
        return own

    def start_reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, Wait]:
        """Starts to sum a 1-D tensor over all ranks. Returns the tensor that has this rank's part once the
        wait has been called."""
        longest = max(lengths)
        if min(lengths) < longest:
            tensor = torch.cat(
                [torch.cat([p, p.new_zeros(longest - p.numel())]) for p in tensor.split(list(lengths))]
            )
        own, summed = tensor.new_empty(longest), tensor.contiguous()
        work: Any = dist.reduce_scatter_tensor(own, summed, group=self.handle, async_op=True)

        def wait() -> None:
            with self.timed():
                work.wait()

        return own[: lengths[self.index]], wait

    def all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Sends the first `sent[0]` rows (along dim 0) to rank 0 and so on; returns `received[0]` rows of
        rank 0, then those of rank 1 and so on."""
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        with self.timed():
            dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=self.handle)
        return arrived


class LoneRank:
    """A `ReplicaGroup` of one rank."""

    index, size = 0, 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor."""
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> Wait:
        """Leaves the tensor as it is."""
        return lambda: None

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Returns the tensor."""
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Returns the tensor."""
        return tensor

    def start_reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, Wait]:
        """Returns the tensor, with nothing to wait for."""
        return tensor, lambda: None

    def all_to_all(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Returns the rows."""
        return rows


@dataclass(frozen=True)
class ReplicaGroups:
    """The groups of a rank, by section, where they have several ranks: its replica, and in it the ranks that
    share parameters (tp) and those that share the rows of sequences (cp). The latter are also by size: all of
    them, and subgroups that compute parts of a micro-batch."""

    replica: dict[str, ReplicaProcessGroup]
    tp: dict[str, ReplicaProcessGroup]
    cp: dict[str, dict[int, ReplicaProcessGroup]]


def make_replica_groups(plan: Plan, rank: int) -> ReplicaGroups:
    """Returns the groups of this rank. Collective: call it on all ranks at the same point."""
    handles: dict[Ranks, Any] = {}
    found = ReplicaGroups({}, {}, {})

    def join_groups(groups: dict[Any, ReplicaProcessGroup], key: Any, every: Sequence[Ranks]) -> None:
        for ranks in (ranks for ranks in every if len(ranks) > 1):
            if ranks not in handles:
                handles[ranks] = dist.new_group(list(ranks))
            if rank in ranks:
                groups[key] = ReplicaProcessGroup(ranks, rank, handles[ranks])

    for section in plan.sections:
        replicas, tp = ranks_by_replica(section), section.mesh.tp
        join_groups(found.replica, section.name, replicas)
        join_groups(found.tp, section.name, [r[i : i + tp] for r in replicas for i in range(0, len(r), tp)])
        sizes = [section.mesh.cp, *(s.ranks for s in section.subgroups if section.may_deal)]
        by_size = found.cp.setdefault(section.name, {})
        for size in sizes:
            join_groups(by_size, size, cp_ranks_by_replica(section, size))
    return found


def make_exchange_groups(plan: Plan, rank: int) -> dict[str, ReplicaProcessGroup]:
    """Returns the group of ranks that this rank exchanges tokens with, for each section in which replicas
    have different experts: the ranks at one place of consecutive replicas. Collective: call it on all ranks
    at the same point."""
    groups: dict[str, ReplicaProcessGroup] = {}
    for section in filter(exchanges_tokens, plan.sections):
        replicas, count = ranks_by_replica(section), section.mesh.expert_replicas
        for first in range(0, len(replicas), count):
            for ranks in zip(*replicas[first : first + count], strict=True):
                handle = dist.new_group(list(ranks))  # ascending, as a group numbers them
                if rank in ranks:
                    groups[section.name] = ReplicaProcessGroup(ranks, rank, handle)
    return groups


def make_norm_groups(plan: Plan, rank: int) -> dict[str, ReplicaProcessGroup]:
    """Returns the group of all replicas of each section that sums statistics of batch norms over them, if
    this rank is one. Collective: call it on all ranks at the same point."""
    groups: dict[str, ReplicaProcessGroup] = {}
    for section in filter(synchronizes_norms, plan.sections):
        ranks = tuple(section.mesh.ranks)
        handle = dist.new_group(list(ranks))
        if rank in ranks:
            groups[section.name] = ReplicaProcessGroup(ranks, rank, handle)
    return groups
