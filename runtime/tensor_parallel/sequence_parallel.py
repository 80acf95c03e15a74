"""Sequence parallelism: between the scopes that tensor parallelism cuts, each rank works on some positions of
the sequence (norms, residuals, dropouts).

A layer's input is split by positions. A cut scope (attention, feed-forward) gathers all positions, and its
partial sums are reduce-scattered. The layer's output is gathered (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022, figure 5). So what a layer keeps between its scopes shrinks
to a tp-th; an all-reduce becomes a reduce-scatter and an all-gather, and the ends of the layer gather once
more in each direction. The sequence length need not be divisible by tp: a rank may have fewer positions, or
none.

With context parallelism, the layer's input has a rank's rows of the sequence, and the ranks of tp that share
them divide these. What lies between cut scopes treats each position by itself, so it needs no knowledge of
which positions a rank has.
"""

from __future__ import annotations

from typing import Any

import torch

from secc.runtime.plan.replica_routes import slice_bounds
from secc.runtime.tensor_parallel.replica_group import ReplicaGroup, Wait

POSITION_DIM = 1  # in hidden states [rows, positions, width]


def _position_counts(length: int, group: ReplicaGroup) -> list[int]:
    return [stop - start for start, stop in (slice_bounds(length, i, group.size) for i in range(group.size))]


def _own_positions(x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
    """Returns this rank's positions in memory of their own, so that the whole tensor can be freed."""
    start, stop = slice_bounds(x.shape[POSITION_DIM], group.index, group.size)
    return x.narrow(POSITION_DIM, start, stop - start).clone()


def gather_all_positions(x: torch.Tensor, group: ReplicaGroup, length: int) -> torch.Tensor:
    """Concatenates all ranks' positions in order."""
    if not x.shape[0] * length:  # rows of a sequence, or frames, may be fewer than ranks of cp
        return x.new_empty(x.shape[0], length, *x.shape[2:])
    sizes = _position_counts(length, group)
    row = x.shape[0] * x.shape[2:].numel()
    flat = group.all_gather(x.contiguous().view(-1), [n * row for n in sizes]).split([n * row for n in sizes])
    return torch.cat(
        [part.view(x.shape[0], n, *x.shape[2:]) for part, n in zip(flat, sizes, strict=True)], POSITION_DIM
    )


def _sum_own_positions(x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:
    """Returns this rank's positions of the sum over all ranks."""
    own, wait = start_sum_of_positions(x, group)
    wait()
    return own


def start_sum_of_positions(x: torch.Tensor, group: ReplicaGroup) -> tuple[torch.Tensor, Wait]:
    """Starts to sum `x` over all ranks. Returns the tensor that has this rank's positions of the sum once the
    wait has been called."""
    if not x.shape[:2].numel():
        return _own_positions(x, group), lambda: None
    sizes = _position_counts(x.shape[POSITION_DIM], group)
    row = x.shape[0] * x.shape[2:].numel()
    flat = torch.cat([part.reshape(-1) for part in x.split(sizes, POSITION_DIM)])
    own, wait = group.start_reduce_scatter(flat, [n * row for n in sizes])
    return own.view(x.shape[0], sizes[group.index], *x.shape[2:]), wait


def chunks_of_positions(length: int, group: ReplicaGroup, count: int) -> list[list[tuple[int, int]]]:
    """Divides the positions of each rank into `count` chunks: for each chunk (start, stop) of every rank's
    positions in it, without chunks in which no rank has one."""
    ranks = [slice_bounds(length, i, group.size) for i in range(group.size)]
    pieces = [[slice_bounds(stop - start, k, count) for start, stop in ranks] for k in range(count)]
    found = [
        [(start + a, start + b) for (start, _), (a, b) in zip(ranks, chunk, strict=True)] for chunk in pieces
    ]
    return [chunk for chunk in found if any(a < b for a, b in chunk)]


class _LikeInput(torch.autograd.Function):
    """Returns a placeholder without memory in the shape of `x`, with the rows of a sequence that `x` has."""

    works_on_rows = True  # of a sequence (`secc.runtime.context_parallel`)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.new_empty(()).expand(x.shape)


class _SplitPositions(torch.autograd.Function):
    works_on_rows, divided_dim = True, POSITION_DIM

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.length = group, x.shape[POSITION_DIM]
        return _own_positions(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gather_all_positions(gradient, ctx.group, ctx.length), None


class _GatherPositions(torch.autograd.Function):
    """All ranks' positions `x`, as many as `like` has and of the same rows."""

    works_on_rows = True

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, like: torch.Tensor, x: torch.Tensor, group: ReplicaGroup, parts: bool
    ) -> torch.Tensor:
        ctx.group, ctx.parts = group, parts
        return gather_all_positions(x, group, like.shape[POSITION_DIM])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, (_sum_own_positions if ctx.parts else _own_positions)(gradient, ctx.group), None, None


class _ReduceScatterPositions(torch.autograd.Function):
    works_on_rows, divided_dim = True, POSITION_DIM

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ReplicaGroup) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.length = group, x.shape[POSITION_DIM]
        return _sum_own_positions(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gather_all_positions(gradient, ctx.group, ctx.length), None


class SequencePositions:
    """Splits, gathers and reduce-scatters the positions of the running layer."""

    def __init__(self, group: ReplicaGroup) -> None:
        self.group, self._like = group, torch.empty(0)

    def split_positions(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's positions [rows, own positions, width] of `x` [rows, positions, width], which
        all ranks hold."""
        with torch.no_grad():
            self._like = _LikeInput.apply(x)  # pyright: ignore
        return _SplitPositions.apply(x, self.group)  # pyright: ignore[reportUnknownMemberType,reportReturnType]

    def gather_positions(self, x: torch.Tensor, parts: bool) -> torch.Tensor:
        """Concatenates all ranks' positions `x` [rows, own positions, width] to [rows, positions, width].
        With `parts`, the consumers compute a part on each rank, so gradients are summed over ranks; otherwise
        all ranks compute the same, and each takes its own positions of the gradient."""
        return _GatherPositions.apply(self._like, x, self.group, parts)  # pyright: ignore[reportUnknownMemberType,reportReturnType]

    def reduce_scatter_positions(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this rank's positions of the sum of `x` [rows, positions, width] over all ranks."""
        return _ReduceScatterPositions.apply(x, self.group)  # pyright: ignore[reportUnknownMemberType,reportReturnType]
