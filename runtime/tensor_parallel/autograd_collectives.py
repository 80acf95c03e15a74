"""The collectives of a tensor-parallel replica with their gradients: where activations that all ranks hold
whole meet activations that each rank holds a part of.

The gradient of a whole activation is the same on all ranks; the gradient of a part belongs to the part. So a
step from the whole into parts sums gradients, a step from parts to the whole sums values, and none does both
(f and g of Shoeybi et al., "Megatron-LM", 2019).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from secc.runtime.tensor_parallel.replica_group import ReplicaGroup
from secc.runtime.tensor_parallel.sequence_parallel import SequencePositions


class _CopyToShards(torch.autograd.Function):
    works_on_rows = True  # of a sequence (`secc.runtime.context_parallel`)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.group.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _ReduceFromShards(torch.autograd.Function):
    works_on_rows = True  # of a sequence (`secc.runtime.context_parallel`)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return group.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


class _GatherLastDim(torch.autograd.Function):
    works_on_rows = True  # of a sequence (`secc.runtime.context_parallel`)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup, sizes: list[int]) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.start, ctx.length = sum(sizes[: group.index]), sizes[group.index]
        rows = x.shape[:-1].numel()
        flat = group.all_gather(x.contiguous().view(-1), [rows * size for size in sizes])
        parts = flat.split([rows * size for size in sizes])
        return torch.cat(
            [part.view(*x.shape[:-1], size) for part, size in zip(parts, sizes, strict=True)], -1
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.narrow(-1, ctx.start, ctx.length), None, None


def copy_to_shards(x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
    """Returns `x` (any shape) and sums its gradient over all ranks in backward (Megatron's f)."""
    return _CopyToShards.apply(x, group)  # pyright: ignore[reportUnknownMemberType,reportReturnType]


def reduce_from_shards(x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
    """Returns the sum of `x` (any shape) over all ranks (Megatron's g)."""
    return _ReduceFromShards.apply(x, group)  # pyright: ignore[reportUnknownMemberType,reportReturnType]


class ShardedRegion:
    """Entry to and exit from a region of modules that work on parts. Modules that take the same tensor one
    after the other (queries, keys and values) share one sum of its gradient."""

    def __init__(self, group: ReplicaGroup) -> None:
        self.group, self.positions = group, SequencePositions(group)
        self._last_input: tuple[weakref.ref[torch.Tensor], bool, torch.Tensor] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns `x` (any shape) and sums its gradient over all ranks in backward."""
        grad = torch.is_grad_enabled()
        if self.group.size == 1 or not (grad and x.requires_grad):
            return x
        if self._last_input is not None and self._last_input[0]() is x and self._last_input[1] == grad:
            return self._last_input[2]
        entered = copy_to_shards(x, self.group)
        self._last_input = weakref.ref(x), grad, entered
        return entered

    def reduce_output(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `x` (any shape) over all ranks."""
        self._last_input = None
        return x if self.group.size == 1 else reduce_from_shards(x, self.group)


def gather_last_dim(x: torch.Tensor, group: ReplicaGroup, sizes: list[int]) -> torch.Tensor:
    """Concatenates the tensors of all ranks along the last dim, in which they have `sizes`."""
    return _GatherLastDim.apply(x, group, sizes)  # pyright: ignore[reportUnknownMemberType,reportReturnType]
