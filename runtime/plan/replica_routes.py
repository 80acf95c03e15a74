"""Between which ranks the messages of an edge travel, where producers and consumers are replicas of one or
several ranks.

Every rank of a replica has an edge's whole tensor. So each rank of the producer sends a part of the flat
message, and the consumer's ranks gather the parts among themselves: each entry crosses once. Where the two
replicas share ranks, those have the tensor already, and each of the others gets it whole from one of them.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import NamedTuple

from secc.runtime.plan.schema import Mesh, Section
from secc.runtime.plan.step_program import replica_first_ranks

Ranks = tuple[int, ...]


class MessageSlice(NamedTuple):
    """Part `index` of `count` of a flat message, from rank `sender` to rank `receiver`."""

    sender: int
    receiver: int
    index: int
    count: int


@cache
def route_message(sources: Ranks, targets: Ranks) -> tuple[MessageSlice, ...]:
    """The parts that the ranks of two replicas exchange; none where every target is a source, too."""
    if len(sources) == len(targets) == 1:  # by far the most
        return (MessageSlice(sources[0], targets[0], 0, 1),) if sources != targets else ()
    lacking = [r for r in targets if r not in sources]
    if len(lacking) < len(targets):
        return tuple(MessageSlice(sources[i % len(sources)], r, 0, 1) for i, r in enumerate(lacking))
    count = max(len(sources), len(targets))
    return tuple(
        MessageSlice(sources[i * len(sources) // count], targets[i * len(targets) // count], i, count)
        for i in range(count)
    )


def slice_bounds(size: int, index: int, count: int) -> tuple[int, int]:
    """Where part `index` of `count` of `size` entries starts and ends."""
    return index * size // count, (index + 1) * size // count


def gather_counts(sources: Ranks, targets: Ranks, size: int) -> list[int]:
    """How many of `size` entries each target receives, in order, where all of them must gather; [] where
    nobody needs to."""
    found = [0] * len(targets)
    for part in route_message(sources, targets):
        start, stop = slice_bounds(size, part.index, part.count)
        found[targets.index(part.receiver)] += stop - start
    return found if len(targets) > 1 and not set(sources) & set(targets) else []


def ranks_by_replica(section: Section) -> tuple[Ranks, ...]:
    """The ranks of each replica, which run the same program in step. Raises ValueError for a mesh with
    stages."""
    return _split_replicas(replica_first_ranks(section), section.mesh)


@cache
def _split_replicas(first: Ranks, mesh: Mesh) -> tuple[Ranks, ...]:
    return tuple(mesh.ranks[r * mesh.tp : (r + 1) * mesh.tp] for r in range(len(first)))


@cache
def shared_extra_ranks(meshes: tuple[Mesh, ...]) -> dict[Mesh, dict[int, Ranks]]:
    """The ranks that replicas keep busy besides their first, by that, where they matter: where ranks are in
    other replicas, too, which have another first rank."""
    if all(m.tp == 1 for m in meshes):
        return {}
    firsts: dict[int, set[int]] = defaultdict(set)
    groups = {m: _split_replicas(m.ranks[:: m.tp], m) for m in meshes}
    for ranks in (ranks for some in groups.values() for ranks in some):
        for rank in ranks:
            firsts[rank].add(ranks[0])
    wide = {
        m: {ranks[0]: tuple(r for r in ranks[1:] if len(firsts[r]) > 1) for ranks in some}
        for m, some in groups.items()
        if m.tp > 1
    }
    return {
        m: found
        for m, some in wide.items()
        if (found := {first: others for first, others in some.items() if others})
    }
