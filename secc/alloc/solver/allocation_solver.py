"""Solves allocation problems: small ones by trying all assignments, larger ones by CP-SAT
(`secc.alloc.solver.cpsat_model`). To import CP-SAT takes longer than to try a thousand assignments, so it is
imported when a problem needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment, Problem, Solution
from secc.alloc.solver.coarse_problem import coarsen_problem, time_unit
from secc.alloc.solver.subproblem import keep_candidates

MOST_TRIED = 500  # assignments
_MOST_SECTIONS = 6  # more can be grouped in more ways than that

Objective = tuple[int, int, int]


def solve_allocation(problem: Problem, margin: float = 0.0, most: int | None = None) -> Solution | None:
    """Returns the fastest assignment, None if there is none or none takes at most `most` ns.

      margin: replicas of several ranks are used only where they are faster by more than this share: of the
          assignments within this share of the fastest, the one with the fewest doublings of a replica's
          ranks.

    Raises RuntimeError if CP-SAT found or refuted no assignment within its limit.
    """
    if any(c.excluded for cs in problem.sections.values() for c in cs):
        allowed = keep_candidates(problem, lambda c: not c.excluded)
        found = None if allowed is None else solve_allocation(allowed.problem, margin, most)
        return found if allowed is None or found is None else allowed.solution_of_whole(found)
    if len(problem.sections) <= _MOST_SECTIONS:
        groupings = list(_group_sections([*problem.sections]))
        if len(groupings) * prod(map(len, problem.sections.values())) <= MOST_TRIED:
            return _try_all(problem, groupings, margin, most)
    from secc.alloc.solver import cpsat_model

    return cpsat_model.solve_allocation(problem, margin=margin, most=most)


def solve_least_memory(problem: Problem) -> int | None:
    """Returns the bytes that a rank needs at least, whatever the step time; None if the other constraints
    cannot be met."""
    from secc.alloc.solver import cpsat_model

    return cpsat_model.solve_least_memory(problem)


def solve_least_time(problem: Problem) -> int | None:
    """Returns the shortest step time in ns on any number of the ranks; None if nothing fits."""
    from secc.alloc.solver import cpsat_model

    return cpsat_model.solve_least_time(problem)


def _group_sections(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yields each way to put sections into groups: the group of each section, named after its first."""
    if not names:
        yield {}
        return
    for before in _group_sections(names[:-1]):
        for group in (*dict.fromkeys(before.values()), names[-1]):
            yield before | {names[-1]: group}


def _try_all(
    problem: Problem, groupings: Sequence[Mapping[str, str]], margin: float, most: int | None
) -> Solution | None:
    """Solves a problem by evaluating each assignment with one of the groupings. Among equals the first one is
    taken."""
    coarse = coarsen_problem(problem)
    found = dict[Objective, Assignment]()
    narrow = dict[tuple[int, Objective], Assignment]()  # by doublings of replicas, too
    for a in _list_assignments(coarse, groupings):
        try:
            value = evaluate_assignment(coarse, a)
        except ValueError:
            continue
        if most is None or value.time_ns <= -(-most // time_unit(problem)):
            chosen = [coarse.sections[s][i] for s, i in a.choice.items()]
            first, second = value.time_ns, value.ranks
            if coarse.deadline is not None:
                first, second = second, first
            objective = first, second, sum(c.extras for c in chosen)
            found.setdefault(objective, a)
            narrow.setdefault((sum(c.width for c in chosen), objective), a)
    if not found:
        return None
    best = won = min(found)
    assignment = found[best]
    if margin and any(problem.sections[s][i].width for s, i in assignment.choice.items()):
        won, assignment = _pick_narrow(narrow, best, margin, coarse.deadline is not None)
    value = evaluate_assignment(problem, assignment)
    gap = (won[0] - best[0]) / max(won[0], 1)
    return Solution(assignment, value.time_ns, "OPTIMAL", round(gap, 6), value.ranks)


def _pick_narrow(
    found: Mapping[tuple[int, Objective], Assignment], best: Objective, margin: float, has_deadline: bool
) -> tuple[Objective, Assignment]:
    """Returns the best of the assignments with the fewest doublings of replicas, among those that are slower
    than the best one by at most `margin`, with no more ranks than it if there is a deadline."""

    def is_close(objective: Objective) -> bool:
        if has_deadline:
            return objective[0] == best[0] and objective[1] <= int(best[1] * (1 + margin))
        return objective[0] <= int(best[0] * (1 + margin))

    key = min(key for key in found if is_close(key[1]))
    return key[1], found[key]


def _list_assignments(problem: Problem, groupings: Sequence[Mapping[str, str]]) -> Iterator[Assignment]:
    for group in groupings:
        for indices in product(*(range(len(cs)) for cs in problem.sections.values())):
            yield Assignment(dict(zip(problem.sections, indices, strict=True)), dict(group))
