"""Plans with other numbers of stages than the best one has, and the budget that neighbours are tried in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.pins import parse_pins
from secc.alloc.problem.types import Assignment, Problem
from secc.alloc.refine import local_search
from secc.alloc.refine.local_search import RefinedPlan, _LocalSearch, refine_by_simulation
from secc.alloc.refine.schedule_evaluation import PlanEvaluator
from secc.alloc.solver.cpsat_model import solve_allocation
from tests.alloc.explain.test_least_step import staged_problem
from tests.alloc.refine.test_local_search import hand_out_ranks

RANKS = 10


def staged_evaluator(*more: str) -> tuple[Problem, PlanEvaluator]:
    """An encoder and a language model of one rank a stage, apart."""
    work, _ = staged_problem(RANKS)
    texts = ["lm.tp=1", "lm.cp=1", "lm.micro_batch=1", "lm.sharding=none", "lm.recompute=none"]
    texts += ["vision.sharding=none", *more]
    asked = build_problem(work, RANKS, "apart", parse_pins(texts, work.loads))
    return asked, PlanEvaluator(work, asked)


def plan_with_stages(asked: Problem, pp: int) -> Assignment:
    """The language model in so many stages on eight ranks, the encoder on two."""
    choice = {
        s: next(i for i, c in enumerate(cs) if c.ranks == ranks and (s != "lm" or c.pp == pp))
        for (s, cs), ranks in zip(asked.sections.items(), (2, 8), strict=True)
    }
    return Assignment(choice, {s: s for s in choice})


def test_other_stages_of_the_best_plan_are_tried_on_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, evaluator = staged_evaluator()
    two, one = plan_with_stages(asked, 2), plan_with_stages(asked, 1)
    steps = [evaluator.evaluate(a, hand_out_ranks(asked, a)).time_ns for a in (two, one)]
    assert steps[1] < steps[0]

    def refine_plan() -> RefinedPlan:
        return refine_by_simulation(evaluator, asked, two, lambda a: hand_out_ranks(asked, a), 0.0)

    monkeypatch.setattr(local_search, "MAX_EVALUATED_PLANS", 0)
    monkeypatch.setattr(local_search, "MOST_LIGHTER_PLANS", 0)
    monkeypatch.setattr(local_search, "MOST_PROMISING_PLANS", 0)
    monkeypatch.setattr(local_search, "start_plans", lambda *_: [])
    monkeypatch.setattr(_LocalSearch, "_shorten_waits", lambda _, a: a)
    found = refine_plan()
    assert found.assignment.choice == one.choice and found.evaluation.time_ns == steps[1]
    monkeypatch.setattr(local_search, "CLOSED_FORM_MARGIN", -1)  # closed forms put all others too far behind
    assert refine_plan().assignment.choice == two.choice


@pytest.mark.parametrize("pins", [("lm.pp=1",), ("lm.pp=2",), ("lm.pp=2", "lm.backward=split")])
def test_the_tasks_of_a_plan_are_known_before_it_is_scheduled(pins: tuple[str, ...]) -> None:
    asked, evaluator = staged_evaluator(*pins)
    a = plan_with_stages(asked, 1 if "lm.pp=1" in pins else 2)
    search = _LocalSearch(evaluator, asked, asked, 0.0, lambda _: [], lambda _: [])
    tasks = evaluator.estimate(a, hand_out_ranks(asked, a)).tasks
    assert tasks <= search._expected_tasks(a) <= 1.25 * tasks  # replicas may have fewer micro-batches


def test_neighbours_are_tried_as_far_as_their_tasks_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, evaluator = staged_evaluator()
    solution = solve_allocation(asked)
    assert solution is not None
    search = _LocalSearch(evaluator, asked, asked, 0.0, lambda _: [], lambda _: [])
    plans = [plan_with_stages(asked, pp) for pp in (1, 2, 1)]
    first, second = map(search._expected_tasks, plans[:2])
    assert second > first > 0
    for budget, most in ((0, 0), (first, 1), (first + second - 1, 1), (first + second, 2), (1 << 20, 3)):
        monkeypatch.setattr(local_search, "TASK_BUDGET_RANGE", (budget, budget))
        assert search._affordable(plans) == plans[:most]
        assert search._may_evaluate() == (budget > 0)
    search.evaluated = [replace(solution.assignment)] * local_search.MAX_EVALUATED_PLANS
    assert not search._affordable(plans) and not search._may_evaluate()
