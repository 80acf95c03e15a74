"""The allocation problem in the units that it is solved in: times in few digits, bytes in whole MiB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from secc.alloc.problem.types import AllocEdge, Candidate, Problem

# Times above this are solved in coarser units, so that sums stay far from CP-SAT's 64 bits.
TIME_RESOLUTION = 10**8


def time_unit(problem: Problem) -> int:
    """Ns in a unit of the coarsened problem."""
    return max(1, -(-max(c.time_ns for cs in problem.sections.values() for c in cs) // TIME_RESOLUTION))


def coarsen_problem(problem: Problem) -> Problem:
    """Problem in time units in which the largest work is at most `TIME_RESOLUTION`; times are rounded up,
    and bytes to whole MiB."""
    unit = time_unit(problem)

    def round_up(ns: int) -> int:
        return -(-ns // unit)

    def round_up_fields(e: AllocEdge, *names: str) -> dict[str, tuple[int, ...]]:
        return {name: tuple(map(round_up, getattr(e, name))) for name in names}

    def coarsen_candidate(c: Candidate) -> Candidate:
        return c.with_fields(
            time_ns=round_up(c.time_ns),
            idle_ns=round_up(c.time_ns) - round_up(c.busy_ns),
            memory=round_up_to_mebibytes(c.memory) << 20,
            memory_ahead=round_up_to_mebibytes(c.memory_ahead) << 20,
        )

    sections = {s: tuple(map(coarsen_candidate, cs)) for s, cs in problem.sections.items()}
    edges = tuple(
        replace(
            e,
            sent_bytes=_round_sizes_up(e.sent_bytes),
            returned_bytes=_round_sizes_up(e.returned_bytes),
            **round_up_fields(e, "latency_ns", "slack_ns", "independent_ns", "message_ns", "round_trip_ns"),
        )
        for e in problem.edges
    )
    deadline = None if problem.deadline is None else problem.deadline // unit
    return replace(problem, sections=sections, edges=edges, deadline=deadline)


def _round_sizes_up(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(round_up_to_mebibytes(size) << 20 for size in sizes)


def round_up_to_mebibytes(size: int) -> int:
    """Returns bytes in MiB, rounded up."""
    return -(-size >> 20)
