"""Parts of a problem: those candidates that a bound on the step leaves, or that are of one kind.

A model of thousands of candidates takes long to build and to search. A good assignment bounds the step, and
then most of them are out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from secc.alloc.problem.types import Assignment, Candidate, Problem
from secc.alloc.solver.group_bounds import MAX_GROUPED_SECTIONS, GroupBounds


@dataclass(frozen=True)
class Subproblem:
    """A problem with some of another's candidates: `places` are where these stand there."""

    problem: Problem
    indices: Mapping[str, Sequence[int]]

    def to_whole(self, a: Assignment) -> Assignment:
        """The part's assignment as one of the other problem."""
        return Assignment({s: self.indices[s][i] for s, i in a.choice.items()}, a.group)

    def indices_of(self, a: Assignment) -> dict[str, int]:
        """Where the candidates of the other problem's assignment stand in the part."""
        return {s: self.indices[s].index(i) for s, i in a.choice.items()}


def keep_candidates(problem: Problem, test: Callable[[Candidate], bool]) -> Subproblem | None:
    """The candidates of which the test holds; None where a section has none."""
    places = {s: [i for i, c in enumerate(cs) if test(c)] for s, cs in problem.sections.items()}
    return _restrict_problem(problem, places) if all(places.values()) else None


def prune_by_step_time(problem: Problem, most: int) -> Subproblem | None:
    """What a step of at most `most` leaves; None where a section has no candidate left."""
    if len(problem.sections) > MAX_GROUPED_SECTIONS:
        return keep_candidates(problem, lambda c: c.time_ns <= most)
    places = GroupBounds(problem, most).remaining_candidates()
    return _restrict_problem(problem, places) if all(places.values()) else None


def _restrict_problem(problem: Problem, places: Mapping[str, Sequence[int]]) -> Subproblem:
    def of(section: str, column: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(column.__getitem__, places[section]))

    sections = {s: tuple(map(cs.__getitem__, places[s])) for s, cs in problem.sections.items()}
    edges = tuple(
        replace(
            e,
            sent_bytes=of(e.src, e.sent_bytes),
            latency_ns=of(e.src, e.latency_ns),
            slack_ns=of(e.src, e.slack_ns),
            returned_bytes=of(e.dst, e.returned_bytes),
            independent_ns=of(e.dst, e.independent_ns),
            message_ns=of(e.dst, e.message_ns),
            round_trip_ns=of(e.dst, e.round_trip_ns),
        )
        for e in problem.edges
    )
    return Subproblem(replace(problem, sections=sections, edges=edges), places)
