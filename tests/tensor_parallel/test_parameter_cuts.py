"""Messages between replicas of several ranks, and parameters cut over ranks: every entry exactly once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from secc.runtime.parameters.sliced_tensor_store import TensorSlice
from secc.runtime.plan.replica_routes import gather_counts, route_message, slice_bounds
from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut

ranks = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True).map(tuple)


@given(ranks, ranks, st.integers(0, 40))
def test_every_receiving_rank_gets_the_whole_message(
    sources: tuple[int, ...], targets: tuple[int, ...], size: int
) -> None:
    parts = route_message(sources, targets)
    assert all(p.sender in sources and p.receiver in targets and p.receiver not in sources for p in parts)
    lacking = [r for r in targets if r not in sources]
    if len(lacking) < len(targets):
        assert sorted(p.receiver for p in parts) == sorted(lacking) and all(p.count == 1 for p in parts)
    else:  # consecutive slices in the order of the receivers, which gather them
        ends = [slice_bounds(size, p.index, p.count) for p in parts]
        assert ends[0][0] == 0 and ends[-1][1] == size and all(a[1] == b[0] for a, b in pairwise(ends))
        assert [targets.index(p.receiver) for p in parts] == sorted(targets.index(p.receiver) for p in parts)
        lengths = [
            sum(b - a for p, (a, b) in zip(parts, ends, strict=True) if p.receiver == r) for r in targets
        ]
        assert gather_counts(sources, targets, size) == (lengths if len(targets) > 1 else [])
        assert len({(p.sender, p.receiver) for p in parts}) == len(
            parts
        )  # at most one message between two ranks


shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3)


@given(shapes, st.data())
def test_parts_of_a_parameter_reassemble(shape: list[int], data: Any) -> None:
    dim, count = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 4))
    parts = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    shape[dim] = sum(parts)
    ep = data.draw(st.integers(1, 3)) if dim else 1
    whole, back = torch.randn(shape), torch.zeros(shape)
    for index in range(count * ep):
        cut = ParameterCut(whole.shape, dim, parts, index, count * ep, ep)
        own = cut.take_shard(whole)
        assert own.shape == cut.local_shape
        start = data.draw(st.integers(0, own.numel()))
        for a, b in ((0, start), (start, own.numel())):  # as with an optimizer sharded over replicas
            for (offsets, sizes), memory in TensorSlice(
                own.view(-1)[a:b], own.shape, a, cut
            )._boxes_with_memory():  # pyright: ignore[reportPrivateUsage]
                place = back
                for d, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                    place = place.narrow(d, offset, size)
                assert not place.any()
                place.copy_(memory)
    assert torch.equal(back, whole)
