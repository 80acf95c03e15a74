"""Enumerates layouts of a section and drops candidates that are dominated by another one.

Tensor parallelism stays inside a node and is a power of two; numbers of stages are powers of two up to the
number of layers, and others that divide the layers almost evenly (`stage_counts`). A section on more than
`ANY_COUNT_MAX_RANKS` ranks takes whole nodes, so that the number of candidates grows with nodes and not with
ranks. Of candidates on the same number of ranks, those stay that no
other one beats in time, waits and memory at once (a Pareto front). A candidate with pipeline stages can only
be dominated by another one with stages: in a scheduled step they wait for more than closed forms predict, and
the local search (`secc.alloc.refine.local_search`) needs alternatives to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from secc.alloc.problem.types import Candidate

ANY_COUNT_MAX_RANKS = 32  # clusters up to this size are divided rank by rank, larger ones node by node
# Where the number of stages is no power of two, the longest has at most this share more layers than the mean.
MOST_MORE_LAYERS = 1 / 16
MEMORY_RESOLUTION = 40  # of the capacity: memories in one step count as equal


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def stage_counts(layers: int) -> list[int]:
    """Numbers of stages for a section of `layers` layers, ascending: powers of two, and 3, 5 and 7 times
    these where the longest stage has at most `MOST_MORE_LAYERS` more layers than the mean one.

    Such a number lets a pipeline leave as many nodes to other sections as these need: of 32 nodes, replicas
    of 5 nodes leave 2, and replicas of 4 nodes leave none or 4.
    """
    counts = (odd * n for odd in (1, 3, 5, 7) for n in powers_of_two(layers // odd))
    return sorted(
        n for n in counts if not n & (n - 1) or -(-layers // n) * n <= layers * (1 + MOST_MORE_LAYERS)
    )


def replica_counts(replica: int, ranks: int, per_node: int, most: int) -> Iterator[int]:
    """Yields the replica counts, up to `most`, of a section with `replica` ranks in each replica on up to
    `ranks` ranks."""
    for dp in range(1, min(ranks // replica, most) + 1):
        ranks_used = dp * replica
        if (
            ranks <= ANY_COUNT_MAX_RANKS
            or ranks_used % per_node == 0
            or (ranks_used < per_node and per_node % ranks_used == 0)
        ):
            yield dp


def prune_dominated(
    candidates: Iterable[Candidate], capacity: int, by_micro_batch: bool = False
) -> tuple[Candidate, ...]:
    """Removes candidates that another one on as many ranks dominates; of equal ones the plainest stays.

    With `by_micro_batch`, only candidates with the same micro-batch size are compared. Candidates above
    `capacity` bytes are removed unless nothing fits: then the smallest ones stay, so that messages can say
    how much is missing.
    """
    all_candidates = list(candidates)
    fitting = [c for c in all_candidates if c.memory <= capacity] or _smallest_candidates(all_candidates)
    groups: dict[tuple[int, bool, int], list[Candidate]] = {}
    for c in fitting:
        groups.setdefault((c.ranks, c.pp > 1, c.micro_batch if by_micro_batch else 0), []).append(c)
    return tuple(
        c for group in groups.values() for c in _pareto_front(group, max(1, capacity // MEMORY_RESOLUTION))
    )


def _smallest_candidates(candidates: Sequence[Candidate]) -> list[Candidate]:
    least_bytes = min((c.memory for c in candidates), default=0)
    return [c for c in candidates if c.memory <= least_bytes]


def _pareto_front(group: Sequence[Candidate], step: int) -> list[Candidate]:
    """The Pareto front. Times are compared first, so a candidate can only be dominated by an earlier one
    in this order."""
    front: list[tuple[tuple[int, int, int, int], Candidate]] = []
    for _, _, (wait, rounds, memory, ahead), c in sorted(
        ((c.time_ns, c.extras, _dominance_costs(c, step), c) for c in group), key=lambda k: k[:3]
    ):
        if not any(w <= wait and r <= rounds and m <= memory and a <= ahead for (w, r, m, a), _ in front):
            front.append(((wait, rounds, memory, ahead), c))
    return [c for _, c in front]


def _dominance_costs(c: Candidate, step: int) -> tuple[int, int, int, int]:
    """Costs of a candidate besides its time: wait, rounds (replicas in lockstep count half a round more) and
    memory in two cases, in steps of `step` bytes."""
    return (
        c.fill_ns + c.drain_ns,
        2 * c.rounds + c.runs_in_lockstep,
        -(-c.memory // step),
        -(-c.memory_ahead // step),
    )
