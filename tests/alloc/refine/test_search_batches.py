"""Evaluators of the same work share the batches that plans are compared on, and what is packed of them."""

from __future__ import annotations

import pytest

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.pins import parse_pins
from secc.alloc.refine import schedule_evaluation
from secc.alloc.refine.schedule_evaluation import PlanEvaluator, SearchBatches
from secc.alloc.solver.allocation_solver import solve_allocation
from secc.passes.allocate import assign_ranks
from tests.alloc.explain.test_least_step import staged_problem


def test_batches_are_drawn_once_and_what_is_packed_changes_no_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, _ = staged_problem(8)
    asked = build_problem(work, 8, "apart", parse_pins(["lm.pp=2", "lm.tp=1"], work.loads))
    solution = solve_allocation(asked)
    assert solution is not None
    plan, ranks = solution.assignment, assign_ranks(asked, solution.assignment)
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
