"""Routes the messages of an edge between the ranks of a producer's and a consumer's replica.

Every rank of a replica has an edge's whole tensor. So each rank of the producer sends a slice of the flat
message, and the consumer's ranks all-gather the slices: each entry crosses the network once. If the two
replicas share ranks, those have the tensor already, and each of the others receives all of it from one of
them.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import chain
from typing import NamedTuple

from secc.runtime.plan.schema import Mesh, Section
from secc.runtime.plan.step_program import replica_first_ranks

Ranks = tuple[int, ...]


class MessageSlice(NamedTuple):
    """Slice `index` of `count` of a flat message, from rank `sender` to rank `receiver`."""

    sender: int
    receiver: int
    index: int
    count: int


@cache
def route_message(sources: Ranks, targets: Ranks) -> tuple[MessageSlice, ...]:
    """Returns the slices that the ranks of two replicas exchange; none if every target is also a source."""
    if len(sources) == len(targets) == 1:  # the common case
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
    """Returns [start, stop) of slice `index` of `count` in a message of `size` entries."""
    return index * size // count, (index + 1) * size // count


def gather_counts(sources: Ranks, targets: Ranks, size: int) -> list[int]:
    """Returns how many of `size` entries each target receives, in order, if the targets must all-gather; else
    [].
    """
    counts = [0] * len(targets)
    for piece in route_message(sources, targets):
        start, stop = slice_bounds(size, piece.index, piece.count)
        counts[targets.index(piece.receiver)] += stop - start
    return counts if len(targets) > 1 and not set(sources) & set(targets) else []


def ranks_by_replica(section: Section) -> tuple[Ranks, ...]:
    """Returns the ranks of each replica, which run the same program. Raises ValueError for a mesh with
    stages.
    """
    return _split_replicas(replica_first_ranks(section), section.mesh)


def tp_ranks_of(section: Section, rank: int) -> Ranks:
    """Returns the ranks that share parts of parameters with `rank`; () if the section is not on it."""
    size = section.mesh.tp
    ranks = next((ranks for ranks in ranks_by_replica(section) if rank in ranks), ())
    first = ranks.index(rank) // size * size if ranks else 0
    return ranks[first : first + size]


def cp_ranks_by_replica(section: Section, size: int) -> tuple[Ranks, ...]:
    """Returns the groups of `size` ranks that share the rows of sequences: all ranks of cp, or neighbouring
    ones, for each replica and each position in tensor parallelism."""
    tp = section.mesh.tp
    groups = [ranks[place::tp] for ranks in ranks_by_replica(section) for place in range(tp)]
    return tuple(ranks[i : i + size] for ranks in groups for i in range(0, len(ranks), size))


@cache
def _split_replicas(first: Ranks, mesh: Mesh) -> tuple[Ranks, ...]:
    return tuple(mesh.ranks[r * mesh.replica_size : (r + 1) * mesh.replica_size] for r in range(len(first)))


@cache
def shared_extra_ranks(meshes: tuple[Mesh, ...]) -> dict[Mesh, dict[int, Ranks]]:
    """Returns for each mesh {first rank of a replica: the replica's other ranks that replicas with a
    different first rank also use}.

    The scheduler books a replica's work on its first rank alone. That is enough unless another replica uses
    one of its other ranks; then those ranks must be booked too. Meshes and replicas without such ranks are
    left out.
    """
    if all(m.replica_size == 1 for m in meshes):
        return {}
    first_ranks: dict[int, set[int]] = defaultdict(set)
    replicas = {m: _split_replicas(m.ranks[:: m.replica_size], m) for m in meshes}
    for ranks in chain.from_iterable(replicas.values()):
        for rank in ranks:
            first_ranks[rank].add(ranks[0])
    extra = {
        m: {ranks[0]: tuple(r for r in ranks[1:] if len(first_ranks[r]) > 1) for ranks in mesh_replicas}
        for m, mesh_replicas in replicas.items()
        if m.replica_size > 1
    }
    return {
        m: shared
        for m, by_first in extra.items()
        if (shared := {first: others for first, others in by_first.items() if others})
    }
