"""The start plans of the local search, against all assignments of small problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment, Candidate, Problem, Solution
from secc.alloc.refine import start_plans as start_plans_module
from secc.alloc.refine.start_plans import (
    MAX_KIND_RATIO,
    MAX_START_RATIO,
    MOST_DEALT_STARTS,
    plans_with_dealt_samples,
    start_plans,
)
from secc.alloc.solver.cpsat_model import solve_allocation
from tests.alloc.problem_instances import assignments, problems


def chosen(problem: Problem, a: Assignment) -> list[Candidate]:
    return [problem.sections[s][i] for s, i in a.choice.items()]


def fastest(problem: Problem, test: Callable[[Assignment], bool]) -> int | None:
    """The shortest step of the feasible assignments with `test(a)`, by trying all."""
    found: list[int] = []
    for a in assignments(problem):
        try:
            found += [evaluate_assignment(problem, a).time_ns] if test(a) else []
        except ValueError:
            continue
    return min(found, default=None)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_starts_include_the_best_plan_of_each_kind(problem: Problem) -> None:
    problem = replace(problem, strategy="auto")
    assume(len(problem.sections) > 1 and (best := solve_allocation(problem)) is not None)
    assert best is not None

    def level(a: Assignment) -> bool:
        return (
            len(set(a.group.values())) == 1
            and {c.ranks for c in chosen(problem, a)} == {problem.ranks}
            and len({c.dp for c in chosen(problem, a)}) == 1
        )

    def plain(a: Assignment) -> bool:
        return all(c.rounds == 1 for c in chosen(problem, a))

    def apart(a: Assignment) -> bool:
        return len(set(a.group.values())) == len(a.group)

    found = start_plans(problem, best.assignment, 0.0)
    kinds = [level] if plain(best.assignment) else [level, plain]
    kinds += [] if apart(best.assignment) else [lambda a: apart(a) and plain(a)]
    for kind in kinds:
        wanted = fastest(problem, kind)
        if wanted is not None and wanted <= MAX_START_RATIO * best.time_ns:
            assert wanted in {evaluate_assignment(problem, a).time_ns for a in found if kind(a)}


def test_equal_replica_counts_are_a_start_although_others_are_faster() -> None:
    def ways(fast: int) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(
                dp=n, micro_batch=1, time_ns=10 if n == fast else 14, micro_batches=1, memory=0, tp=4 // n
            )
            for n in (1, 2)
        )

    problem = Problem({"a": ways(1), "b": ways(2)}, (), 4, capacity=1 << 20)
    best = solve_allocation(problem)
    assert best is not None
    assert {c.dp for c in chosen(problem, best.assignment)} == {1, 2}
    assert any(
        len({c.dp for c in chosen(problem, a)}) == 1 for a in start_plans(problem, best.assignment, 0.0)
    )


def test_more_stages_are_a_start_although_fewer_are_faster() -> None:
    """The largest section in two, four and eight stages, each slower than the one before, next to a small one
    in one stage."""
    large = tuple(
        Candidate(dp=16 // n, micro_batch=1, time_ns=100 + n, micro_batches=1, memory=0, pp=n)
        for n in (2, 4, 8)
    )
    small = (Candidate(dp=1, micro_batch=1, time_ns=50, micro_batches=1, memory=0),)
    problem = Problem({"large": large, "small": small}, (), 17, capacity=1 << 20)
    best = solve_allocation(problem)
    assert best is not None
    assert problem.sections["large"][best.assignment.choice["large"]].pp == 2
    assert {4, 8} <= {
        problem.sections["large"][a.choice["large"]].pp for a in start_plans(problem, best.assignment, 0.0)
    }


def test_no_stages_are_a_start_although_stages_with_cp_are_faster() -> None:
    ways = tuple(
        Candidate(dp=1, micro_batch=1, time_ns=100 - n, micro_batches=1, memory=0, pp=n, cp=8 // n)
        for n in (1, 2)
    )
    problem = Problem({"lm": ways}, (), 8, capacity=1 << 20)
    best = solve_allocation(problem)
    assert best is not None and chosen(problem, best.assignment)[0].pp == 2
    (start,) = start_plans(problem, best.assignment, 0.0)
    assert chosen(problem, start)[0].pp == 1


@given(problems())
@settings(max_examples=150, deadline=None)
def test_starts_include_the_best_plan_with_dealt_samples_of_each_strategy(problem: Problem) -> None:
    sections = {
        s: tuple(
            replace(c, cp=2 * (i % 2) or 1, cp_per=("section", "micro_batch")[i % 2])
            for i, c in enumerate(cs)
        )
        for s, cs in problem.sections.items()
    }
    problem = replace(problem, strategy="auto", sections=sections)
    best = solve_allocation(problem)
    if len(problem.sections) < 2 or best is None:
        return  # nothing fits, or there is nothing to share ranks with
    own = {s: problem.sections[s][i] for s, i in best.assignment.choice.items()}
    heaviest = max(own, key=lambda s: own[s].time_ns * own[s].ranks)
    found = plans_with_dealt_samples(problem, best.assignment, 0.0)
    assert len(found) <= 2 * MOST_DEALT_STARTS
    for strategy in ("apart", "colocate"):
        variant = replace(problem, strategy=strategy)

        def is_dealt(a: Assignment, variant: Problem = variant) -> bool:
            evaluate_assignment(variant, a)  # raises ValueError where sections share too much or too little
            return problem.sections[heaviest][a.choice[heaviest]].cp_per == "micro_batch"

        wanted = fastest(problem, is_dealt)
        if wanted is not None and wanted <= MAX_KIND_RATIO * best.time_ns:
            assert wanted in {evaluate_assignment(problem, a).time_ns for a in found}


def test_layouts_that_cannot_be_among_the_shortest_are_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen layouts of the larger section, each with more work than the one before; the first four of each
    strategy are the shortest."""
    layouts = [(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8)]
    large = tuple(
        Candidate(dp=n, tp=tp, pp=pp, cp=2, cp_per="micro_batch", micro_batch=1, time_ns=work // n)
        for i, (tp, pp) in enumerate(layouts)
        for work in (10_000 * (20 + i) // (tp * pp),)
        for n in range(1, 128 // (tp * pp) + 1)
    )
    small = tuple(Candidate(dp=n, micro_batch=1, time_ns=50_000 // n) for n in range(1, 257))
    problem = Problem({"large": large, "small": small}, (), 256, capacity=1 << 20)
    best, solved = solve_allocation(problem), list[str]()
    assert best is not None

    def solve_and_note(asked: Problem, margin: float = 0.0, most: int | None = None) -> Solution | None:
        solved.append(asked.strategy)
        return solve_allocation(asked, margin=margin, most=most)

    monkeypatch.setattr(start_plans_module, "PARALLEL_PRICING_RANKS", 257)  # in this process
    monkeypatch.setattr(start_plans_module, "solve_allocation", solve_and_note)
    found = plans_with_dealt_samples(problem, best.assignment, 0.0)
    assert [(c.tp, c.pp) for c, _ in (chosen(problem, a) for a in found)] == 2 * layouts[:4]
    assert len(solved) < len(layouts)
