"""The search changes which sections share ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.types import Assignment
from secc.alloc.refine import local_search
from secc.alloc.refine.local_search import refine_by_simulation
from secc.alloc.refine.schedule_evaluation import Evaluation, GroupRanks, PlanEvaluator
from secc.alloc.solver.cpsat_model import solve_allocation
from tests.alloc.refine.test_local_search import hand_out_ranks, vlm_problem


def found_plan(monkeypatch: pytest.MonkeyPatch, strategy: str, faster_groups: int) -> Assignment:
    """The plan that the search finds from the best one of `strategy` without neighbours, if plans with so
    many groups take half as long as they do."""
    _, asked, evaluator = vlm_problem()
    solution = solve_allocation(replace(asked, strategy=strategy))
    assert solution is not None
    step = PlanEvaluator.evaluate_batch

    def evaluate_batch(
        self: PlanEvaluator, a: Assignment, ranks: GroupRanks, index: int = 0, *, soon: bool = False
    ) -> Evaluation:
        found = step(self, a, ranks, index, soon=soon)
        return replace(found, time_ns=found.time_ns // (1 + (len({*a.group.values()}) == faster_groups)))

    monkeypatch.setattr(PlanEvaluator, "evaluate_batch", evaluate_batch)
    monkeypatch.setattr(local_search, "MAX_EVALUATED_PLANS", 0)
    monkeypatch.setattr(local_search, "MOST_LIGHTER_PLANS", 0)
    monkeypatch.setattr(local_search, "MOST_PROMISING_PLANS", 0)
    monkeypatch.setattr(local_search, "CLOSED_FORM_MARGIN", 2)
    monkeypatch.setattr(local_search, "start_plans", lambda *_: [])
    found = refine_by_simulation(
        evaluator, asked, solution.assignment, lambda a: hand_out_ranks(asked, a), 0.0
    ).assignment
    evaluate_assignment(asked, found)  # violates no constraint
    return found


def test_groups_share_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*found_plan(monkeypatch, "apart", 1).group.values()} == {"vision"}
    monkeypatch.setattr(local_search, "MOST_PLANS_WITH_OTHER_GROUPS", 0)
    assert len({*found_plan(monkeypatch, "apart", 1).group.values()}) == 2


def test_a_section_leaves_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = found_plan(monkeypatch, "colocate", 2)
    assert all(apart.group[s] == s for s in apart.choice)
    monkeypatch.setattr(local_search, "MOST_PLANS_WITH_OTHER_GROUPS", 0)
    assert len({*found_plan(monkeypatch, "colocate", 2).group.values()}) == 1
