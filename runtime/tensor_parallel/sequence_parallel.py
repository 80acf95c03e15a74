"""Layers on parts of the sequence: between the scopes that tp cuts, each rank has some positions (norms,
residuals, dropouts).

What enters a layer is split by positions, a cut scope (attention, feed-forward) gets all of them gathered,
its partial sums are summed and scattered at once, and what leaves the layer is gathered (Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022, figure 5). So what a layer keeps
between its scopes is a tp-th; a sum becomes a scatter and a gather, and the layer's ends gather once more
each way. Sequences need not divide by tp: a rank may have fewer positions, or none.
"""

from __future__ import annotations

from typing import Any

import torch

from secc.runtime.plan.replica_routes import bounds
from secc.runtime.tensor_parallel.replica_group import Group

DIM = 1  # of a layer's hidden states [rows, positions, width]


def _sizes(length: int, group: Group) -> list[int]:
    return [stop - start for start, stop in (bounds(length, i, group.size) for i in range(group.size))]


def _own(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's positions, in memory of their own, so that the whole can go."""
    start, stop = bounds(x.shape[DIM], group.index, group.size)
    return x.narrow(DIM, start, stop - start).clone()


def _all(x: torch.Tensor, group: Group, length: int) -> torch.Tensor:
    """All ranks' positions in order."""
    sizes = _sizes(length, group)
    row = x.shape[0] * x.shape[2:].numel()
    flat = group.gather(x.contiguous().view(-1), [n * row for n in sizes]).split([n * row for n in sizes])
    return torch.cat(
        [part.view(x.shape[0], n, *x.shape[2:]) for part, n in zip(flat, sizes, strict=True)], DIM
    )


def _summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's positions of the sum over all ranks."""
    sizes = _sizes(x.shape[DIM], group)
    row = x.shape[0] * x.shape[2:].numel()
    flat = torch.cat([part.reshape(-1) for part in x.split(sizes, DIM)])
    return group.scatter(flat, [n * row for n in sizes]).view(x.shape[0], sizes[group.index], *x.shape[2:])


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.length = group, x.shape[DIM]
        return _own(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all(gradient, ctx.group, ctx.length), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, length: int, parts: bool) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.parts = group, parts
        return _all(x, group, length)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (_summed if ctx.parts else _own)(gradient, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.group, ctx.length = group, x.shape[DIM]
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all(gradient, ctx.group, ctx.length), None


class Positions:
    """The positions of the layer that runs: how many there are, and how ranks exchange theirs."""

    def __init__(self, group: Group) -> None:
        self.group, self.length = group, 0

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's positions of what all ranks have."""
        self.length = x.shape[DIM]
        return _Split.apply(x, self.group)  # pyright: ignore[reportUnknownMemberType,reportReturnType]

    def join(self, x: torch.Tensor, parts: bool) -> torch.Tensor:
        """All ranks' positions. With `parts`, what is made of them is a part on each rank, so that gradients
        are summed."""
        return _Gather.apply(x, self.group, self.length, parts)  # pyright: ignore[reportUnknownMemberType,reportReturnType]

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's positions of the sum of all ranks' `x`."""
        return _Scatter.apply(x, self.group)  # pyright: ignore[reportUnknownMemberType,reportReturnType]
