"""The neighbours of plans that the local search may try: their order, and their closed forms."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import product

import pytest

from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment
from secc.alloc.refine.local_search import _LocalSearch
from secc.alloc.solver.cpsat_model import solve_allocation
from tests.alloc.refine.test_local_search import vlm_problem


def test_the_first_neighbours_of_different_kinds_are_those_of_all() -> None:
    """However few are asked for: ordering stops early."""
    _, asked, evaluator = vlm_problem(ranks=8)
    asked = replace(asked, strategy="apart")
    solution = solve_allocation(asked)
    assert solution is not None
    origin, sections = solution.assignment, asked.sections
    search = _LocalSearch(evaluator, asked, asked, 0.0, NotImplemented, NotImplemented)
    plans = [origin.with_choice(s, i) for s, cs in sections.items() for i in range(len(cs))]
    every = search._diversify_plans(plans, origin)
    assert every != plans and len(every) == len(plans)
    for most in range(1, len(plans) + 2):
        assert search._diversify_plans(plans, origin, most) == every[:most]


def test_plans_that_violate_a_constraint_have_no_closed_form() -> None:
    _, asked, evaluator = vlm_problem()
    asked = replace(asked, strategy="apart")
    search = _LocalSearch(evaluator, asked, asked, 0.0, NotImplemented, NotImplemented)
    group = {s: s for s in asked.sections}
    plans = [
        Assignment(dict(zip(asked.sections, choice, strict=True)), group)
        for choice in product(*(range(len(cs)) for cs in asked.sections.values()))
    ]
    feasible = list(filter(search._is_feasible, [*plans, *plans]))  # those of the second half are known
    expected: list[int] = []
    for a in plans:
        with contextlib.suppress(ValueError):
            expected.append(evaluate_assignment(asked, a).time_ns)
    assert 0 < len(expected) < len(plans)
    assert sorted(map(search._closed_form_ns, feasible)) == sorted(2 * expected)
    impossible = next(a for a in plans if not search._is_feasible(a))
    with pytest.raises(ValueError, match="violates a constraint"):
        search._closed_form_ns(impossible)
