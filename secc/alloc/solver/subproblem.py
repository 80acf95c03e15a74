"""Restricts a problem to some of its candidates: to all that a bound on the step time allows, or to one kind.

A model with thousands of candidates takes long to build and to search. A good assignment bounds the step
time, and that rules most candidates out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from secc.alloc.problem.types import Assignment, Candidate, Problem, Solution
from secc.alloc.solver.group_bounds import MAX_GROUPED_SECTIONS, GroupBounds


@dataclass(frozen=True)
class Subproblem:
    """A problem with some of another one's candidates. `indices[s][i]` is the index of candidate i of
    section s in the other problem."""

    problem: Problem
    indices: Mapping[str, Sequence[int]]

    def to_whole(self, a: Assignment) -> Assignment:
        """Assignment of the subproblem as an assignment of the other problem."""
        return Assignment({s: self.indices[s][i] for s, i in a.choice.items()}, a.group)

    def solution_of_whole(self, found: Solution) -> Solution:
        """Solution of the subproblem as a solution of the other problem."""
        return replace(found, assignment=self.to_whole(found.assignment))

    def indices_of(self, a: Assignment) -> dict[str, int]:
        """Indices in the subproblem of the candidates of the other problem's assignment."""
        return {s: self.indices[s].index(i) for s, i in a.choice.items()}


def keep_candidates(problem: Problem, test: Callable[[Candidate], bool]) -> Subproblem | None:
    """Restricts a problem to the candidates with `test(c)`. None if a section has none."""
    places = {s: [i for i, c in enumerate(cs) if test(c)] for s, cs in problem.sections.items()}
    return _restrict_problem(problem, places) if all(places.values()) else None


def prune_by_step_time(problem: Problem, most: int) -> Subproblem | None:
    """Removes candidates that no step of at most `most` ns can have, and excluded ones. None if a section
    has none left."""
    if len(problem.sections) > MAX_GROUPED_SECTIONS:
        return keep_candidates(problem, lambda c: c.busy_ns <= most and not c.excluded)
    places = GroupBounds(problem, most).remaining_candidates()
    return _restrict_problem(problem, places) if all(places.values()) else None


def _restrict_problem(problem: Problem, places: Mapping[str, Sequence[int]]) -> Subproblem:
    def select(section: str, column: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(column.__getitem__, places[section]))

    sections = {s: tuple(map(cs.__getitem__, places[s])) for s, cs in problem.sections.items()}
    edges = tuple(
        replace(
            e,
            sent_bytes=select(e.src, e.sent_bytes),
            latency_ns=select(e.src, e.latency_ns),
            slack_ns=select(e.src, e.slack_ns),
            returned_bytes=select(e.dst, e.returned_bytes),
            independent_ns=select(e.dst, e.independent_ns),
            message_ns=select(e.dst, e.message_ns),
            round_trip_ns=select(e.dst, e.round_trip_ns),
        )
        for e in problem.edges
    )
    return Subproblem(replace(problem, sections=sections, edges=edges), places)
