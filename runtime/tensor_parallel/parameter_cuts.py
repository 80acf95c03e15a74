"""Which part of a parameter each rank of a tensor-parallel replica has.

A parameter is cut along one dim. The dim may hold several parts side by side (queries, keys and values of a
fused projection, the two halves of a gated one); a rank has its share of every part, one after the other, so
that the user's code finds each where it looks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import nn

from secc.runtime.plan.replica_routes import ranks_by_replica, slice_bounds
from secc.runtime.plan.schema import Plan, Shard

TensorBounds = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True)
class ParameterCut:
    """What rank `index` of `count` has of a tensor of `shape` that is cut along `dim`, whose entries are
    `parts` side by side."""

    shape: torch.Size
    dim: int
    parts: tuple[int, ...]
    index: int
    count: int

    @cached_property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The rank's entries along `dim` as (start, stop), one for each part."""
        starts = [0, *accumulate(self.parts)]
        own = (slice_bounds(size, self.index, self.count) for size in self.parts)
        return tuple(
            (offset + start, offset + stop) for offset, (start, stop) in zip(starts, own, strict=False)
        )

    @property
    def local_shape(self) -> torch.Size:
        """The shape of what the rank has."""
        sizes = list(self.shape)
        sizes[self.dim] = sum(stop - start for start, stop in self.ranges)
        return torch.Size(sizes)

    def take_shard(self, whole: torch.Tensor) -> torch.Tensor:
        """The rank's part of a tensor, in memory of its own."""
        return torch.cat(
            [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim
        ).contiguous()

    def whole_boxes(self, local: TensorBounds) -> Iterator[tuple[TensorBounds, int, int]]:
        """A box of the rank's part as boxes of the whole tensor, each with its place along `dim` in the given
        one: (box, start, length)."""
        offsets, sizes = local
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
    """The parameters, by their first names, of which `rank` has a part. `shapes` are those of whole
    parameters."""
    found: dict[str, ParameterCut] = {}
    for section in plan.sections:
        ranks = next((r for r in ranks_by_replica(section) if rank in r), ())
        for shard in section.shards if len(ranks) > 1 else ():
            name = canonical[shard.name]
            found[name] = _cut_of_shard(shard, shapes[name], ranks.index(rank), len(ranks))
    return found


def _cut_of_shard(shard: Shard, shape: torch.Size, index: int, count: int) -> ParameterCut:
    return ParameterCut(shape, shard.dim, shard.parts, index, count)


def cut_parameters(
    model: nn.Module, cuts: Mapping[str, ParameterCut], valueless: Collection[str] = ()
) -> None:
    """Leave of each parameter in `cuts` the rank's part, of those in `valueless` its shape. The parameters
    stay the same objects, so ties stay tied."""
    params = dict(model.named_parameters())
    for name, cut in cuts.items():
        param = params[name]
        param.data = (
            param.data[(0,) * param.dim()].expand(cut.local_shape)
            if name in valueless
            else cut.take_shard(param.data)
        )
