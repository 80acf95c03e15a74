"""Chooses, for each section with cp, whether its micro-batches are dealt to subgroups of its ranks of cp
(`secc.runtime.plan.dealt_samples`), and to which, by the scheduled step.

A plan is scheduled once more for each of its sections with cp and each way that is left: all ranks share each
sample, samples go to any divisor of them, or to one rank. `allocate` does so with two plans: one that was
found with all samples priced as divided, and one with samples priced as dealt (`alloc.problem.dealt_prices`),
which may have a larger cp or other ranks. A way that is clearly longer on the first batch is not scheduled on
the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.dealt_prices import DealtPrices
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.types import Candidate, Problem
from secc.alloc.problem.workload import Workload
from secc.alloc.refine.local_search import DOES_NOT_FIT, FIRST_BATCH_MARGIN, RefinedPlan
from secc.alloc.refine.schedule_evaluation import GroupRanks, PlanEvaluator

ONE_FOR_ALL, ONE_OR_ALL, ANY = "section", "one_or_all", "any"


@dataclass(frozen=True)
class DealtPlan:
    """A plan after the choice, with its problem. `step_ns`: by section, the scheduled step under each way
    that was tried on all batches and fits, all other choices kept: "section", "one_or_all" or "any"
    divisor. `dropped`: in the same form, how many times as long as the plan the others take on the first
    batch, DOES_NOT_FIT for a way without the memory."""

    problem: Problem
    refined: RefinedPlan
    step_ns: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    dropped: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])


def choose_dealing(
    evaluator: PlanEvaluator, won: RefinedPlan, ranks: GroupRanks, pins: Pins, margin: float
) -> DealtPlan:
    """Returns the plan in which each section with cp deals its micro-batches in the way that makes the
    scheduled step shortest. Dealing has to be shorter by more than the share `margin`. What is pinned stays
    as it is."""
    step_ns, dropped = dict[str, dict[str, int]](), dict[str, dict[str, float]]()
    for section, index in won.assignment.choice.items():
        problem, c = evaluator.problem, evaluator.problem.sections[section][index]
        now, found = _way_of(c), {_way_of(c): (won, evaluator)}
        problems = dict[str, Problem]()
        for way in _ways_left(c, pins.words.get(section, {})):
            candidates = list(problem.sections[section])
            candidates[index] = _with_way(evaluator.work, section, c, way)
            problems[way] = replace(problem, sections={**problem.sections, section: tuple(candidates)})
        if not problems:
            continue
        own, *firsts = evaluator.evaluate_in_problems([*problems.values()], won.assignment, ranks)
        for (way, of_way), first in zip(problems.items(), firsts, strict=True):
            tried = evaluator.with_problem(of_way)
            if not first.fits or first.time_ns > own.time_ns * (1 + FIRST_BATCH_MARGIN):
                ratio = round(first.time_ns / own.time_ns, 4) if first.fits else DOES_NOT_FIT
                dropped.setdefault(section, {})[way] = ratio
                continue
            evaluation = tried.evaluate(won.assignment, ranks)
            if evaluation.fits:
                found[way] = replace(won, evaluation=evaluation), tried
        if len(found) == 1:
            continue
        step_ns[section] = {way: plan.evaluation.time_ns for way, (plan, _) in found.items()}
        weighed = {ONE_FOR_ALL: 1 - margin}
        best = min(found, key=lambda way: (step_ns[section][way] * weighed.get(way, 1), way != now))
        (won, evaluator), tries = found[best], won.evaluated_plans + len(found) - 1
        closed_form_ns = evaluate_assignment(evaluator.problem, won.assignment).time_ns
        won = replace(won, closed_form_ns=closed_form_ns, evaluated_plans=tries)
    return DealtPlan(evaluator.problem, won, step_ns, dropped)


def _way_of(c: Candidate) -> str:
    return c.cp_per if c.cp_per == ONE_FOR_ALL else c.cp_degrees


def _with_way(work: Workload, section: str, c: Candidate, way: str) -> Candidate:
    own = work.for_kind(c.kind)
    prices = DealtPrices(own, own.loads[section])
    divided = prices.price_as_divided(c)
    return divided if way == ONE_FOR_ALL else prices.price_as_dealt(divided, way)


def _ways_left(c: Candidate, pinned: Mapping[str, str]) -> list[str]:
    """The ways that are not that of the candidate, and that pins leave."""
    if c.cp == 1:
        return []
    has_middle = any(c.cp % n == 0 for n in range(2, c.cp))
    ways = [ONE_FOR_ALL, ANY, *([ONE_OR_ALL] if has_middle else [])]
    if "cp_per" in pinned:
        ways = [way for way in ways if (way == ONE_FOR_ALL) == (pinned["cp_per"] == ONE_FOR_ALL)]
    if "cp_degrees" in pinned:
        ways = [way for way in ways if way in (ONE_FOR_ALL, pinned["cp_degrees"])]
    return [way for way in ways if way != _way_of(c)]
