"""Candidates of large clusters that take far longer than good plans are not priced."""

from __future__ import annotations

from secc.alloc.problem.build_problem import build_problem, estimate_longest_time
from secc.alloc.problem.pins import Pins
from secc.alloc.solver.cpsat_model import solve_allocation
from tests.alloc.explain.test_least_step import staged_problem

RANKS = 64


def test_only_candidates_above_the_limit_are_left_out() -> None:
    work, _ = staged_problem(RANKS)
    every = build_problem(work, RANKS, "auto", Pins())
    best = solve_allocation(every)
    assert best is not None
    limited = build_problem(work, RANKS, "auto", Pins(), most_ns=2 * best.time_ns)
    for name, candidates in every.sections.items():
        kept = limited.sections[name]
        assert set(kept) <= set(candidates)
        assert {c for c in candidates if c.time_ns <= 2 * best.time_ns} <= set(kept)
    assert sum(map(len, limited.sections.values())) < sum(map(len, every.sections.values()))
    found = solve_allocation(limited)
    assert found is not None and found.time_ns == best.time_ns


def test_the_limit_leaves_room_for_plans_that_take_twice_the_best_one() -> None:
    work, _ = staged_problem(RANKS)
    limit = estimate_longest_time(work, RANKS, Pins())
    best = solve_allocation(build_problem(work, RANKS, "auto", Pins(), most_ns=limit))
    assert limit is not None and best is not None and 2 * best.time_ns <= limit
    assert estimate_longest_time(staged_problem(8)[0], 8, Pins()) is None
