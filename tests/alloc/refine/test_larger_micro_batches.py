"""Larger micro-batches of replicas that wait for each other, by the scheduled step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from secc.alloc.problem.build_problem import build_problem
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.pins import Pins, parse_pins
from secc.alloc.problem.types import Assignment
from secc.alloc.problem.workload import build_workload
from secc.alloc.refine.larger_micro_batches import enlarge_micro_batches
from secc.alloc.refine.local_search import RefinedPlan
from secc.alloc.refine.schedule_evaluation import Evaluation, GroupRanks, PlanEvaluator
from secc.cluster import parse_cluster
from tests.alloc.compound_mixture import compound_mixture
from tests.alloc.refine.test_local_search import hand_out_ranks

PINNED = ("lm.ep=8", "lm.tp=1", "lm.dp=16", "lm.pp=1", "lm.sharding=zero1", "vision.tp=1", "vision.dp=16")


def mixture_plan(*pins: str) -> tuple[PlanEvaluator, RefinedPlan, GroupRanks]:
    """An encoder and a mixture in 16 replicas that exchange tokens, in micro-batches of one sample."""
    work = build_workload(
        compound_mixture(8_000_000_000, 3_000_000_000_000, 1), parse_cluster("2x8xH100"), 128
    )
    texts = (*PINNED, "vision.micro_batch=1", *pins)
    asked = build_problem(work, 16, "colocate", parse_pins(texts, work.loads))
    plan = Assignment(dict.fromkeys(asked.sections, 0), dict.fromkeys(asked.sections, "vision"))
    evaluator, ranks = PlanEvaluator(work, asked), hand_out_ranks(asked, plan)
    evaluation = evaluator.evaluate(plan, ranks)
    assert evaluation.fits
    return evaluator, RefinedPlan(plan, evaluation, evaluate_assignment(asked, plan).time_ns, 1), ranks


def test_a_larger_limit_that_makes_the_step_shorter_is_taken() -> None:
    evaluator, won, ranks = mixture_plan("lm.micro_batch=1")
    found = enlarge_micro_batches(evaluator, won, ranks, Pins())
    assert found is not None
    (larger,) = found.problem.sections["lm"]
    assert larger.micro_batch > 1 and found.problem.sections["vision"][0].micro_batch == 1
    assert found.refined.evaluation.time_ns < won.evaluation.time_ns
    pinned, same, _ = mixture_plan(f"lm.micro_batch={larger.micro_batch}")
    assert same.evaluation.time_ns == found.refined.evaluation.time_ns
    assert larger.memory == pinned.problem.sections["lm"][0].memory
    steps = found.step_ns["lm"]
    assert list(found.step_ns) == ["lm"] and list(steps.values()) == sorted(steps.values(), reverse=True)
    sizes = list(steps)
    assert (sizes[0], sizes[-1]) == (1, larger.micro_batch)
    assert (
        steps[1] == won.evaluation.time_ns and steps[larger.micro_batch] == found.refined.evaluation.time_ns
    )
    assert larger.time_ns <= evaluator.problem.sections["lm"][0].time_ns


def test_pins_and_limits_that_make_the_step_no_shorter_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator, won, ranks = mixture_plan("lm.micro_batch=1")
    assert enlarge_micro_batches(evaluator, won, ranks, parse_pins(["lm.micro_batch=1"], ["lm"])) is None
    step = PlanEvaluator.evaluate_batch

    def evaluate_as_longer(
        self: PlanEvaluator, a: Assignment, ranks: GroupRanks, index: int = 0, *, soon: bool = False
    ) -> Evaluation:
        found = step(self, a, ranks, index, soon=soon)
        size = self.problem.sections["lm"][a.choice["lm"]].micro_batch
        return replace(found, time_ns=won.evaluation.time_ns + size)

    monkeypatch.setattr(PlanEvaluator, "evaluate_batch", evaluate_as_longer)
    assert enlarge_micro_batches(evaluator, won, ranks, Pins()) is None
