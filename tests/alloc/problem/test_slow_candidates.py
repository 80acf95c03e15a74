"""Candidates of large clusters that take far longer than good plans are not priced."""

from __future__ import annotations

import pytest

from secc.alloc.problem.build_problem import build_problem, estimate_longest_time, parallel_shapes
from secc.alloc.problem.pins import Pins
from secc.alloc.solver.cpsat_model import solve_allocation
from secc.errors import UserError
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


def test_pinned_replicas_are_possible_although_there_are_shapes_of_too_many_ranks_for_them() -> None:
    work, _ = staged_problem(RANKS)  # 16 samples a step
    name = "lm"
    assert any(RANKS // shape.ranks < 16 for shape in parallel_shapes(work, work.loads[name], Pins(), RANKS))
    pins = Pins({name: {"dp": 16}})
    limit = estimate_longest_time(work, RANKS, pins)
    assert limit is not None
    priced = build_problem(work, RANKS, "auto", pins, most_ns=limit).sections[name]
    assert priced and {c.dp for c in priced} == {16}
    too_many = Pins({name: {"dp": 17}})
    with pytest.raises(UserError, match=r"lm.dp=17 is impossible: there are ranks and samples for"):
        build_problem(work, RANKS, "auto", too_many, most_ns=estimate_longest_time(work, RANKS, too_many))
