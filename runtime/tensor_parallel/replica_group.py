"""The ranks of one replica and the collectives among them.

A group sums and gathers plain tensors; gradients are the concern of `autograd_collectives`. Ranks of a run
use a process group; the numeric check of a mapping uses threads of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from secc.runtime.plan.replica_routes import Ranks, ranks_by_replica
from secc.runtime.plan.schema import Plan


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

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Concatenates the 1-D tensors of all ranks; `lengths` are their lengths."""
        ...

    def reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Sums a 1-D tensor over all ranks and returns this rank's part; `lengths` are the lengths of the
        parts."""
        ...


class ReplicaProcessGroup:
    """A `ReplicaGroup` of processes; `handle` is torch's process group."""

    def __init__(self, ranks: Ranks, rank: int, group: Any) -> None:
        self.ranks, self.index, self.size, self.handle = ranks, ranks.index(rank), len(ranks), group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replaces `tensor`, of any shape, by its sum over all ranks, and returns it."""
        dist.all_reduce(tensor, group=self.handle)
        return tensor

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Concatenates the 1-D tensors of all ranks; `lengths` are their lengths."""
        longest = max(lengths)
        padded = (
            tensor
            if tensor.numel() == longest
            else torch.cat([tensor, tensor.new_zeros(longest - tensor.numel())])
        )
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=self.handle)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Sums a 1-D tensor over all ranks and returns this rank's part; `lengths` are the lengths of the
        parts."""
        longest = max(lengths)
        if min(lengths) < longest:
            tensor = torch.cat(
                [torch.cat([p, p.new_zeros(longest - p.numel())]) for p in tensor.split(list(lengths))]
            )
        own = tensor.new_empty(longest)
        dist.reduce_scatter_tensor(own, tensor.contiguous(), group=self.handle)
        return own[: lengths[self.index]]


def make_replica_groups(plan: Plan, rank: int) -> dict[str, ReplicaProcessGroup]:
    """Returns the group of this rank's replica, for each section with several ranks per replica. Collective:
    call it on all ranks at the same point."""
    handles: dict[Ranks, Any] = {}
    groups: dict[str, ReplicaProcessGroup] = {}
    for section in plan.sections:
        for ranks in ranks_by_replica(section):
            if len(ranks) == 1:
                continue
            if ranks not in handles:
                handles[ranks] = dist.new_group(list(ranks))
            if rank in ranks:
                groups[section.name] = ReplicaProcessGroup(ranks, rank, handles[ranks])
    return groups
