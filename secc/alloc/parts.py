"""Parts of a problem: a few candidates that promise a good start, and those that a bound on the step leaves.

A model of thousands of candidates takes long to build and to search. A good assignment bounds the step, and then most of them are out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from secc.alloc.types import Assignment, Candidate, Problem


@dataclass(frozen=True)
class Part:
    """A problem with some of another's candidates: `places` are where these stand there."""

    problem: Problem
    places: Mapping[str, Sequence[int]]

    def whole(self, a: Assignment) -> Assignment:
        """The part's assignment as one of the other problem."""
        return Assignment({s: self.places[s][i] for s, i in a.choice.items()}, a.group)


def kept(problem: Problem, test: Callable[[Candidate], bool]) -> Part | None:
    """The candidates of which the test holds; None where a section has none."""
    places = {s: [i for i, c in enumerate(cs) if test(c)] for s, cs in problem.sections.items()}
    return _part(problem, places) if all(places.values()) else None


def few(problem: Problem) -> Part:
    """Of each section's candidates on equally many ranks the shortest, and those that hold least."""
    return _part(problem, {s: _first(candidates) for s, candidates in problem.sections.items()})


def _first(candidates: Sequence[Candidate]) -> list[int]:
    alike: dict[tuple[int, int], list[int]] = {}
    for i, c in enumerate(candidates):
        alike.setdefault((c.ranks, c.kind), []).append(i)
    found: set[int] = set()
    for some in alike.values():
        found.add(min(some, key=lambda i: candidates[i].time_ns))
        found.add(min(some, key=lambda i: candidates[i].memory))
        found.add(min(some, key=lambda i: candidates[i].memory_ahead))
    return sorted(found)


def within(problem: Problem, most: int) -> Part | None:
    """What a step of at most `most` leaves; None where a section has no candidate left.

    The others take longer by themselves, leave the other sections too few ranks, or too little of the time on all ranks.
    """
    timely = {s: [c for c in cs if c.time_ns <= most] for s, cs in problem.sections.items()}
    if not all(timely.values()):
        return None
    ranks = {s: min(c.ranks for c in cs) for s, cs in timely.items()}
    work = {s: min(c.work for c in cs) for s, cs in timely.items()}
    places: dict[str, list[int]] = {}
    for s, candidates in problem.sections.items():
        others = [n for other, n in ranks.items() if other != s] or [0]
        spare = problem.ranks * most - sum(work.values()) + work[s]
        apart, together = problem.ranks - max(others), min(others)
        left = (i for i, c in enumerate(candidates) if c.time_ns <= most and c.work <= spare)
        places[s] = [i for i in left if candidates[i].ranks <= apart or candidates[i].ranks >= together]
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
