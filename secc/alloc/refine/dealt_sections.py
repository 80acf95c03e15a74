"""Lets sections deal micro-batches to their ranks of cp where the scheduled step is shorter.

The solver prices all samples as divided over the ranks of cp, as closed forms do not list samples. Here the
plan that it and the local search have found is scheduled once more for each of its sections with cp, with
micro-batches that may be dealt (`secc.runtime.plan.dealt_samples`).
"""

from __future__ import annotations

from dataclasses import replace

from secc.alloc.problem.pins import Pins
from secc.alloc.problem.types import Candidate, Problem
from secc.alloc.refine.local_search import RefinedPlan
from secc.alloc.refine.schedule_evaluation import GroupRanks, PlanEvaluator


def deal_where_shorter(
    evaluator: PlanEvaluator, won: RefinedPlan, ranks: GroupRanks, pins: Pins, margin: float
) -> tuple[Problem, RefinedPlan]:
    """Returns the problem and the plan, with candidates that deal their micro-batches where that makes the
    scheduled step shorter by more than the share `margin` and fits. What is pinned stays as it is."""
    for section, index in won.assignment.choice.items():
        problem = evaluator.problem
        c = problem.sections[section][index]
        if "cp_per" in pins.words.get(section, {}) or not _may_deal(c):
            continue
        candidates = list(problem.sections[section])
        candidates[index] = replace(c, cp_per="micro_batch")
        dealing = replace(problem, sections={**problem.sections, section: tuple(candidates)})
        tried = PlanEvaluator(evaluator.work, dealing, evaluator.run_ahead)
        found = tried.evaluate(won.assignment, ranks)
        if found.fits and found.time_ns < (1 - margin) * won.evaluation.time_ns:
            evaluator = tried
            won = replace(won, evaluation=found, evaluated_plans=won.evaluated_plans + 1)
    return evaluator.problem, won


def _may_deal(c: Candidate) -> bool:
    return c.cp > 1 and c.pp == 1 and c.ep == 1 and c.cp_per == "section"
