"""Which layouts a section may have, and which of its candidates are worth a solver's time.

Tensor parallelism stays inside a node and takes powers of two; stages take powers of two up to the layers
there are. A section on more than a few ranks takes whole nodes, so that the number of candidates grows with
the nodes. Of the candidates on equally many ranks those are kept that no other one beats in time, waits and
memory at once. Stages beat stages only: what they wait for in a real order is more than closed forms say, and
trials (`secc.alloc.refine.local_search`) need something to try in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from secc.alloc.problem.types import Candidate

ANY_COUNT_MAX_RANKS = 32  # a cluster of so many ranks is shared out rank by rank, a larger one node by node
LOCKSTEP_SHARDING = "zero3"  # replicas wait for each other in every micro-batch
MEMORY_RESOLUTION = 40  # of the capacity: memories in one step count as equal


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def replica_counts(replica: int, ranks: int, per_node: int, most: int) -> Iterator[int]:
    """The replica counts, up to `most`, of a section whose replicas have `replica` ranks each, on up to
    `ranks` ranks."""
    for dp in range(1, min(ranks // replica, most) + 1):
        used = dp * replica
        if ranks <= ANY_COUNT_MAX_RANKS or used % per_node == 0 or (used < per_node and per_node % used == 0):
            yield dp


def prune_dominated(
    candidates: Iterable[Candidate], capacity: int, alike: bool = False
) -> tuple[Candidate, ...]:
    """The candidates that no other one on as many ranks beats; of equals the plainest. `alike`: only those
    with its micro-batch can.

    Those that do not fit alone are left out unless nothing fits, when the smallest ones stay to say what is
    missing.
    """
    found = list(candidates)
    fitting = [c for c in found if c.memory <= capacity] or _smallest_candidates(found)
    groups: dict[tuple[int, bool, int], list[Candidate]] = {}
    for c in fitting:
        groups.setdefault((c.ranks, c.pp > 1, c.micro_batch if alike else 0), []).append(c)
    return tuple(
        c for group in groups.values() for c in _pareto_front(group, max(1, capacity // MEMORY_RESOLUTION))
    )


def _smallest_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    least = min((c.memory for c in candidates), default=0)
    return [c for c in candidates if c.memory <= least]


def _pareto_front(group: Sequence[Candidate], step: int) -> list[Candidate]:
    """The Pareto front. A candidate can only be beaten by one before it in this order, as times are compared
    first."""
    kept: list[tuple[tuple[int, int, int, int], Candidate]] = []
    for _, _, (wait, rounds, memory, ahead), c in sorted(
        ((c.time_ns, c.extras, _dominance_costs(c, step), c) for c in group), key=lambda k: k[:3]
    ):
        if not any(w <= wait and r <= rounds and m <= memory and a <= ahead for (w, r, m, a), _ in kept):
            kept.append(((wait, rounds, memory, ahead), c))
    return [c for _, c in kept]


def _dominance_costs(c: Candidate, step: int) -> tuple[int, int, int, int]:
    """Waits, rounds (one that keeps replicas in step counts half a round more), and memory in two cases."""
    return (
        c.fill_ns + c.drain_ns,
        2 * c.rounds + (c.sharding == LOCKSTEP_SHARDING),
        -(-c.memory // step),
        -(-c.memory_ahead // step),
    )
