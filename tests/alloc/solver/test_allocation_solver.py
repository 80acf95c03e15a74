"""Trying all assignments of a small problem finds what CP-SAT finds, without importing it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from secc.alloc.problem.types import Candidate, Problem, Solution
from secc.alloc.solver import allocation_solver, cpsat_model
from tests.alloc import problem_instances


def value_of(solution: Solution | None, problem: Problem) -> object:
    if solution is None:
        return None
    chosen = [problem.sections[s][i] for s, i in solution.assignment.choice.items()]
    extras, width = sum(c.extras for c in chosen), sum(c.width for c in chosen)
    return solution.time_ns, solution.ranks, extras, width, solution.gap, solution.status


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(problem_instances.problems(), problem_instances.mixed_problems()),
    st.none() | st.integers(20, 200),
    st.none() | st.integers(10, 200),
    st.sampled_from((0.0, 0.25)),
)
def test_all_tried_assignments_have_the_best_that_cp_sat_finds(
    problem: Problem, deadline: int | None, most: int | None, margin: float
) -> None:
    asked = replace(problem, deadline=deadline)
    tried = allocation_solver.solve_allocation(asked, margin, most)
    solved = cpsat_model.solve_allocation(asked, margin=margin, most=most)
    assert value_of(tried, problem) == value_of(solved, problem)


def test_sections_are_grouped_in_each_way_once() -> None:
    group_sections = allocation_solver._group_sections  # pyright: ignore[reportPrivateUsage]
    for count, ways in enumerate((1, 1, 2, 5, 15, 52)):
        names = [*"abcdef"[:count]]
        found = [*group_sections(names)]
        assert len({tuple(g.items()) for g in found}) == len(found) == ways
        assert all(group[group[name]] == group[name] <= name for group in found for name in group)


def test_larger_problems_are_solved_by_cp_sat() -> None:
    ways = tuple(Candidate(dp=n, micro_batch=1, time_ns=1200 // n) for n in range(1, 13))
    problem = Problem({"a": ways, "b": ways, "c": ways}, (), 36, 1)
    assert allocation_solver.solve_allocation(problem) == cpsat_model.solve_allocation(problem)


def test_small_problems_are_solved_without_importing_cp_sat() -> None:
    script = (
        "import sys\n"
        "from secc.alloc.problem.types import Candidate, Problem\n"
        "from secc.alloc.solver.allocation_solver import solve_allocation\n"
        "problem = Problem({'a': (Candidate(dp=1, micro_batch=1, time_ns=5),)}, (), 1, 1)\n"
        "assert solve_allocation(problem).time_ns == 5\n"
        "import secc.passes.allocate\n"
        "assert not any(name.partition('.')[0] == 'ortools' for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
