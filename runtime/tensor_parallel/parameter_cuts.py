"""Which part of a parameter each rank of a tensor-parallel replica holds.

A parameter is cut along one dim; those of experts may be cut into blocks of whole experts before. The dim may
hold several parts side by side (queries, keys and values of a fused projection, the two halves of a gated
one). A rank holds its share of each part, one after the other, so that the user's code finds each where it
expects it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import nn

from secc.runtime.plan.replica_routes import slice_bounds
from secc.runtime.plan.schema import Plan, Shard

TensorBounds = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True)
class ParameterCut:
    """The part that rank `index` of `count` holds of a tensor of `shape`, cut along `dim`, which holds
    `parts` side by side. With `ep` above 1, dim 0 is cut into `ep` blocks first; `count / ep` consecutive
    ranks share a block along `dim`. With a `holder`, that rank has all entries and others have none."""

    shape: torch.Size
    dim: int
    parts: tuple[int, ...]
    index: int
    count: int
    ep: int = 1
    holder: int = -1

    @property
    def has_first_entry(self) -> bool:
        """Whether this is the first of the parts that have entries."""
        return self.index == max(0, self.holder)

    @cached_property
    def experts(self) -> tuple[int, int]:
        """The rank's entries along dim 0 as (start, stop), before the tensor is cut along `dim`."""
        return slice_bounds(self.shape[0], self.index * self.ep // self.count, self.ep)

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The rank's entries along `dim` as (start, stop), one for each part."""
        if self.holder >= 0:
            return ((0, self.shape[self.dim] if self.index == self.holder else 0),)
        starts, sharing = [0, *accumulate(self.parts)], self.count // self.ep
        shares = (slice_bounds(size, self.index % sharing, sharing) for size in self.parts)
        return tuple(
            (offset + start, offset + stop) for offset, (start, stop) in zip(starts, shares, strict=False)
        )

    @property
    def local_shape(self) -> torch.Size:
        """The shape of the rank's part."""
        sizes = list(self.shape)
        if self.ep > 1:
            sizes[0] = self.experts[1] - self.experts[0]
        sizes[self.dim] = sum(stop - start for start, stop in self.ranges)
        return torch.Size(sizes)

    def take_shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the rank's part of `whole`, in memory of its own."""
        if self.ep > 1:
            whole = whole[slice(*self.experts)]
        return torch.cat(
            [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim
        ).contiguous()

    def whole_boxes(self, local: TensorBounds) -> Iterator[tuple[TensorBounds, int, int]]:
        """Translates a box of the rank's part into boxes of the whole tensor: yields (box, start, length),
        where `start` and `length` are the box's position along `dim` within the given one."""
        offsets, sizes = local
        if self.ep > 1:
            offsets = _replace_at(offsets, 0, offsets[0] + self.experts[0])
        first, last = offsets[self.dim], offsets[self.dim] + sizes[self.dim]
        places = [0, *accumulate(stop - start for start, stop in self.ranges)]
        for (start, _), (begin, end) in zip(self.ranges, pairwise(places), strict=True):
            a, b = max(first, begin), min(last, end)
            if a < b:
                yield (
                    (_replace_at(offsets, self.dim, start + a - begin), _replace_at(sizes, self.dim, b - a)),
                    a - first,
                    b - a,
                )


def _replace_at(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def find_parameter_cuts(
    plan: Plan, rank: int, shapes: Mapping[str, torch.Size], canonical: Mapping[str, str]
) -> dict[str, ParameterCut]:
    """Returns the cut of each parameter, by canonical name, that `rank` holds a part of. `shapes`: of whole
    parameters."""
    cuts: dict[str, ParameterCut] = {}
    for section in plan.sections:
        if rank not in section.mesh.ranks:
            continue
        place = section.mesh.ranks.index(rank)
        for shard in section.shards:
            name, count, replica = canonical[shard.name], section.mesh.tp, place // section.mesh.replica_size
            if count * shard.replicas > 1:
                cuts[name] = cut_of_shard(shard, shapes[name], place % count, count, replica)
    return cuts


def cut_of_shard(shard: Shard, shape: torch.Size, index: int, count: int, replica: int = 0) -> ParameterCut:
    """Returns the part of a sharded parameter of `shape` that rank `index` of `count` of a replica holds."""
    index = index * shard.replicas + replica % shard.replicas
    return ParameterCut(shape, shard.dim, shard.parts, index, count * shard.replicas, shard.ep, shard.holder)


def cut_parameters(
    model: nn.Module, cuts: Mapping[str, ParameterCut], valueless: Collection[str] = ()
) -> None:
    """Reduces each parameter in `cuts` to the rank's part; parameters in `valueless` only change their shape.
    The parameters remain the same objects, so tied parameters stay tied."""
    params = dict(model.named_parameters())
    for name, cut in cuts.items():
        param = params[name]
        param.data = (
            param.data[(0,) * param.dim()].expand(cut.local_shape)
            if name in valueless
            else cut.take_shard(param.data)
        )
