"""Evaluators of the same work share the batches that plans are compared on, and what is packed of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from secc import process_map
from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.types import Assignment, Problem
from secc.alloc.problem.workload import Workload
from secc.alloc.refine import schedule_evaluation
from secc.alloc.refine.schedule_evaluation import Evaluation, GroupRanks, PlanEvaluator, SearchBatches
from secc.alloc.solver.allocation_solver import solve_allocation
from secc.passes.allocate import assign_ranks
from secc.runtime.schedule import order_search
from tests.alloc.explain.test_least_step import staged_problem


def test_batches_are_drawn_once_and_what_is_packed_changes_no_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, asked, plan, ranks = two_stages()
    alone = PlanEvaluator(work, asked).evaluate_batch(plan, ranks)
    shared, drawn = SearchBatches(), list[int]()
    draw = schedule_evaluation.drawn_samples.draw_search_batches
    monkeypatch.setattr(
        schedule_evaluation.drawn_samples,
        "draw_search_batches",
        lambda graph, count: drawn.append(count) or draw(graph, count),
    )
    first = PlanEvaluator(work, asked, shared=shared)
    assert first.evaluate_batch(plan, ranks) == alone
    second = PlanEvaluator(work, asked, shared=shared)
    assert len(drawn) == 1
    assert second.packings[0] is first.packings[0]
    assert second.packings[0].sample_values
    assert second.evaluate_batch(plan, ranks) == alone


def two_stages() -> tuple[Workload, Problem, Assignment, GroupRanks]:
    """The best plan of two stages on eight ranks, with the ranks of its groups."""
    work, _ = staged_problem(8)
    asked = build_problem(work, 8, "apart", parse_pins(["lm.pp=2", "lm.tp=1"], work.loads))
    solution = solve_allocation(asked)
    assert solution is not None
    return work, asked, solution.assignment, assign_ranks(asked, solution.assignment)


@pytest.mark.parametrize("searches", [True, False])
def test_an_estimate_without_time_for_a_search_is_the_evaluation(
    searches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_search, "PLANNING_TIME_DIVISOR", 1 if searches else 1 << 62)
    monkeypatch.setattr(order_search, "TRY_NS_PER_TASK", 1)
    work, asked, plan, ranks = two_stages()
    evaluator = PlanEvaluator(work, asked)
    estimate = evaluator.estimate_once(plan, ranks)
    assert estimate.may_improve == searches
    made = list[int]()
    evaluate_batch = PlanEvaluator.evaluate_batch
    monkeypatch.setattr(
        PlanEvaluator, "evaluate_batch", lambda *given: made.append(1) or evaluate_batch(*given)
    )
    (evaluation,) = evaluator.evaluate_in_problems([], plan, ranks)
    assert len(made) == searches
    assert evaluation == PlanEvaluator(work, asked).evaluate_batch(plan, ranks)


def test_evaluations_with_time_for_a_search_run_on_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a better order of a step with few tasks may take long."""
    monkeypatch.setattr(order_search, "PLANNING_TIME_DIVISOR", 1)
    monkeypatch.setattr(schedule_evaluation, "MIN_PARALLEL_TASKS", 1000)
    work, asked, plan, ranks = two_stages()
    sections = {s: tuple(replace(c, time_ns=2 * c.time_ns) for c in cs) for s, cs in asked.sections.items()}
    dearer = replace(asked, sections=sections)
    evaluator, forked = PlanEvaluator(work, asked), list[Evaluation]()

    def map_here(function: Callable[[Any], Evaluation], items: Iterable[Any]) -> list[Evaluation]:
        forked.extend(map(function, items))
        return forked

    monkeypatch.setattr(process_map, "map_in_processes", map_here)
    evaluations = evaluator.evaluate_in_problems([dearer], plan, ranks)
    assert evaluations == [evaluator.evaluate_batch(plan, ranks)] * 2 and not forked
    evaluator.known.clear()
    for problem in (asked, dearer):
        estimate = evaluator.with_problem(problem).estimate_once(plan, ranks)
        assert estimate.may_improve and 2 * estimate.tasks < schedule_evaluation.MIN_PARALLEL_TASKS
    monkeypatch.setattr(order_search, "TRY_NS_PER_TASK", 1)
    assert evaluator.evaluate_in_problems([dearer], plan, ranks) == forked and len(forked) == 2
