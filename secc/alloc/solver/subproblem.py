"""Parts of a problem: those candidates that a bound on the step leaves, or that are of one kind.

A model of thousands of candidates takes long to build and to search. A good assignment bounds the step, and
then most of them are out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from secc.alloc.problem.types import Assignment, Candidate, Problem
from secc.alloc.solver.group_bounds import MOST_SECTIONS, Groups


@dataclass(frozen=True)
class Part:
    """A problem with some of another's candidates: `places` are where these stand there."""

    problem: Problem
    places: Mapping[str, Sequence[int]]

    def whole(self, a: Assignment) -> Assignment:
        """The part's assignment as one of the other problem."""
        return Assignment({s: self.places[s][i] for s, i in a.choice.items()}, a.group)

    def places_of(self, a: Assignment) -> dict[str, int]:
        """Where the candidates of the other problem's assignment stand in the part."""
        return {s: self.places[s].index(i) for s, i in a.choice.items()}


def kept(problem: Problem, test: Callable[[Candidate], bool]) -> Part | None:
    """The candidates of which the test holds; None where a section has none."""
    places = {s: [i for i, c in enumerate(cs) if test(c)] for s, cs in problem.sections.items()}
    return _part(problem, places) if all(places.values()) else None


def within(problem: Problem, most: int) -> Part | None:
    """What a step of at most `most` leaves; None where a section has no candidate left."""
    if len(problem.sections) > MOST_SECTIONS:
        return kept(problem, lambda c: c.time_ns <= most)
    places = Groups(problem, most).left()
    return _part(problem, places) if all(places.values()) else None


def _part(problem: Problem, places: Mapping[str, Sequence[int]]) -> Part:
    def of(section: str, column: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(column.__getitem__, places[section]))

    sections = {s: tuple(map(cs.__getitem__, places[s])) for s, cs in problem.sections.items()}
    edges = tuple(
        replace(
            e,
            sent=of(e.src, e.sent),
            latency=of(e.src, e.latency),
            slack=of(e.src, e.slack),
            returned=of(e.dst, e.returned),
            free=of(e.dst, e.free),
            messages=of(e.dst, e.messages),
            round=of(e.dst, e.round),
        )
        for e in problem.edges
    )
    return Part(replace(problem, sections=sections, edges=edges), places)
