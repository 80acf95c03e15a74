"""The collectives of a tensor-parallel replica with their gradients: where activations that all ranks hold
whole meet activations that each rank holds a part of.

The gradient of a whole activation is the same on all ranks; the gradient of a part belongs to the part. So a
step from the whole into parts sums gradients, a step from parts to the whole sums values, and none does both
(f and g of Shoeybi et al., "Megatron-LM", 2019).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from secc.runtime.tensor_parallel.linear_modules import LinearModule
from secc.runtime.tensor_parallel.overlapped_products import (
    EnteredInput,
    can_chunk,
    scatter_product_in_chunks,
    sum_product_in_chunks,
)
from secc.runtime.tensor_parallel.replica_group import ReplicaGroup, Wait
from secc.runtime.tensor_parallel.sequence_parallel import SequencePositions, start_sum_of_positions


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
    after the other (queries, keys and values) share one sum of its gradient.

    overlap: which sums travel behind products, one of `secc.runtime.plan.schema.OVERLAPS`. siblings: for each
    column-parallel linear map, those that may read the same tensor, itself included."""

    def __init__(
        self,
        group: ReplicaGroup,
        overlap: str = "none",
        siblings: Mapping[nn.Module, tuple[LinearModule, ...]] | None = None,
    ) -> None:
        self.group, self.positions, self.overlap = group, SequencePositions(group), overlap
        self.siblings = siblings or {}
        self._last_input: tuple[weakref.ref[torch.Tensor], bool, torch.Tensor] | None = None
        self._last_entered: EnteredInput | None = None  # where the sum of the last input's gradient overlaps

    def __call__(self, x: torch.Tensor, products: Sequence[LinearModule] = ()) -> torch.Tensor:
        """Returns `x` (any shape) and sums its gradient over all ranks in backward. products: the linear maps
        that may read it next."""
        grad = torch.is_grad_enabled()
        if self.group.size == 1 or not (grad and x.requires_grad):
            self._last_entered = None
            return x
        if self._last_input is not None and self._last_input[0]() is x and self._last_input[1] == grad:
            return self._last_input[2]
        self._last_entered = EnteredInput(x, products, x, self._start_sum) if products else None
        entered = copy_to_shards(x, self.group) if self._last_entered is None else self._last_entered.entered
        self._last_input = weakref.ref(x), grad, entered
        return entered

    def _start_sum(self, gradient: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        return total, self.group.start_all_reduce(total)

    def gather_for_products(self, x: torch.Tensor, products: Sequence[LinearModule]) -> torch.Tensor:
        """Concatenates all ranks' positions `x` [rows, own positions, width] for code on parts that has these
        column-parallel products; gradients are summed over ranks."""
        self._forget_input()
        if not (products and torch.is_grad_enabled() and x.requires_grad):
            return self.positions.gather_positions(x, parts=True)
        with torch.no_grad():
            whole = self.positions.gather_positions(x, parts=True)
        self._last_entered = EnteredInput(
            x, products, whole, lambda gradient: start_sum_of_positions(gradient, self.group)
        )
        return self._last_entered.entered

    def multiply_gathered(self, x: torch.Tensor, product: LinearModule) -> torch.Tensor | None:
        """Returns a column-parallel product of the `x` that `gather_for_products` returned last, None for any
        other."""
        found = self._last_entered
        return found.multiply(product) if found is not None and found.entered is x else None

    def scatter_product(self, x: torch.Tensor, product: LinearModule) -> torch.Tensor:
        """Returns this rank's positions of a row-parallel product of `x` [rows, positions, inputs], summed
        over all ranks, without its bias."""
        self._forget_input()
        if self.overlap != "both" or x.ndim != 3 or not can_chunk(product, x):
            return self.positions.reduce_scatter_positions(product.multiply_weight(x))
        return scatter_product_in_chunks(product, x, self.group)

    def multiply(
        self, x: torch.Tensor, product: LinearModule, products: Sequence[LinearModule]
    ) -> torch.Tensor | None:
        """Returns a column-parallel product of a whole `x` [..., inputs], one of `products`, which may share
        it, with the sum of its gradient behind the gradients of weights; None if that is not possible."""
        self(x, products)
        return None if self._last_entered is None else self._last_entered.multiply(product)

    def sum_product(self, x: torch.Tensor, product: LinearModule) -> torch.Tensor:
        """Returns a row-parallel product of `x` [..., inputs], summed over all ranks, without its bias."""
        if self.overlap != "both" or self.group.size == 1 or not can_chunk(product, x):
            return self.reduce_output(product.multiply_weight(x))
        self._forget_input()
        return sum_product_in_chunks(product, x, self.group)

    def reduce_output(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `x` (any shape) over all ranks."""
        self._forget_input()
        return x if self.group.size == 1 else reduce_from_shards(x, self.group)

    def _forget_input(self) -> None:
        self._last_input = self._last_entered = None


def gather_last_dim(x: torch.Tensor, group: ReplicaGroup, sizes: list[int]) -> torch.Tensor:
    """Concatenates the tensors of all ranks along the last dim, in which they have `sizes`."""
    return _GatherLastDim.apply(x, group, sizes)  # pyright: ignore[reportUnknownMemberType,reportReturnType]
