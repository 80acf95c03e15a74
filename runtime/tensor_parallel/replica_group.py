"""The ranks of one replica and the collectives between them.

A group sums and gathers plain tensors; what that means for gradients is in `collectives`. Ranks use a process
group; the numeric check of a mapping puts threads of one process in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from secc.runtime.plan.replica_routes import Ranks, ranks_by_replica
from secc.runtime.plan.schema import Plan


class ReplicaGroup(Protocol):
    """`size` ranks, of which this is number `index`."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, which may be written into `tensor`, contiguous."""
        ...

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """All ranks' 1-D tensors one after the other; `lengths` has the length of each."""
        ...

    def reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """This rank's part of the sum over all ranks of a 1-D tensor that holds parts of these lengths."""
        ...


class ReplicaProcessGroup:
    """A `Group` of processes; `handle` is torch's."""

    def __init__(self, ranks: Ranks, rank: int, group: Any) -> None:
        self.ranks, self.index, self.size, self.handle = ranks, ranks.index(rank), len(ranks), group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self.handle)
        return tensor

    def all_gather(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        most = max(lengths)
        own = (
            tensor if tensor.numel() == most else torch.cat([tensor, tensor.new_zeros(most - tensor.numel())])
        )
        parts = [torch.empty_like(own) for _ in lengths]
        dist.all_gather(parts, own, group=self.handle)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])

    def reduce_scatter(self, tensor: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        most = max(lengths)
        if min(lengths) < most:
            tensor = torch.cat(
                [torch.cat([p, p.new_zeros(most - p.numel())]) for p in tensor.split(list(lengths))]
            )
        own = tensor.new_empty(most)
        dist.reduce_scatter_tensor(own, tensor.contiguous(), group=self.handle)
        return own[: lengths[self.index]]


def make_replica_groups(plan: Plan, rank: int) -> dict[str, ReplicaProcessGroup]:
    """The group of this rank's replica of each section that has replicas of several ranks. Collective: on all
    ranks in the same order."""
    made: dict[Ranks, Any] = {}
    found: dict[str, ReplicaProcessGroup] = {}
    for section in plan.sections:
        for ranks in ranks_by_replica(section):
            if len(ranks) == 1:
                continue
            if ranks not in made:
                made[ranks] = dist.new_group(list(ranks))
            if rank in ranks:
                found[section.name] = ReplicaProcessGroup(ranks, rank, made[ranks])
    return found
