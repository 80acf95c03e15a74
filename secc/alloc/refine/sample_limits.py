"""Lets a section form micro-batches of more short samples than memory was counted for mean ones, by the
scheduled step.

Closed forms count memory for micro-batches of a number of mean samples, and a section has no candidate with
more than fit. But what bounds a rank's memory in a step is the bytes in flight, whatever the number of
samples: the scheduler may put four short samples in the place of two mean ones. That saves what takes time
once in each micro-batch, such as issuing operations, reading weights of experts and adding their gradients.
It does not always help, as larger micro-batches also make pipelines and other sections wait. So the best plan
is scheduled with twice the samples in one section after the other, and again while that is shorter: on the
first batch, and where it is shorter there on all batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from secc.alloc.problem.candidates import with_sample_limit
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.types import Problem
from secc.alloc.problem.workload import Workload
from secc.alloc.refine.local_search import STEP_RESOLUTION, RefinedPlan
from secc.alloc.refine.schedule_evaluation import Evaluation, GroupRanks, PlanEvaluator

RATIO = 2  # of a tried limit to the one before
PINS = ("micro_batch", "micro_batch_tokens", "most_samples")  # with one of them a section stays as it is


@dataclass(frozen=True)
class LimitedPlan:
    """A plan after the choice, with its problem. `step_ns`: by section with another limit, the scheduled step
    with the plan's limit and each one that was taken, in the order in which they were."""

    problem: Problem
    refined: RefinedPlan
    step_ns: Mapping[str, Mapping[int, int]] = field(default_factory=dict[str, Mapping[int, int]])


def raise_sample_limits(
    evaluator: PlanEvaluator, won: RefinedPlan, ranks: GroupRanks, pins: Pins
) -> LimitedPlan:
    """Returns the plan in which the micro-batches of each section have as many samples at most as make the
    scheduled step shortest."""
    step_ns = dict[str, dict[int, int]]()
    for section, index in won.assignment.choice.items():
        while True:
            c = evaluator.problem.sections[section][index]
            problem = _with_limit(evaluator, won, section, RATIO * c.most_samples, pins)
            if problem is None:
                break
            tried, tries = evaluator.with_problem(problem), won.evaluated_plans + 1
            now, first = evaluator.evaluate_in_problems([problem], won.assignment, ranks)
            if not _is_shorter(first, now):
                break
            evaluation = tried.evaluate(won.assignment, ranks)
            if not _is_shorter(evaluation, won.evaluation):
                break
            steps = step_ns.setdefault(section, {c.most_samples: won.evaluation.time_ns})
            steps[RATIO * c.most_samples] = evaluation.time_ns
            won, evaluator = replace(won, evaluation=evaluation, evaluated_plans=tries), tried
    return LimitedPlan(evaluator.problem, won, step_ns)


def _is_shorter(one: Evaluation, other: Evaluation) -> bool:
    """Whether a step fits and is clearly shorter than another."""
    return one.fits and (other.time_ns - one.time_ns) * STEP_RESOLUTION > one.time_ns


def _with_limit(
    evaluator: PlanEvaluator, plan: RefinedPlan, section: str, most: int, pins: Pins
) -> Problem | None:
    """The problem in which a section's micro-batches have up to `most` samples, None where pins, the number
    of samples or memory do not allow that, or no bytes bound a micro-batch: it has no backward."""
    problem, index = evaluator.problem, plan.assignment.choice[section]
    c = problem.sections[section][index]
    work = evaluator.work.for_kind(c.kind)
    load = work.loads[section]
    if load.mode == "forward" or work.whole_batch_kind(load) or c.micro_batch_tokens:
        return None
    if any(pins.pinned_number(section, key) is not None for key in PINS):
        return None
    if most > _samples_of_replica(work, section, c.dp):
        return None
    candidates = list(problem.sections[section])
    candidates[index] = with_sample_limit(work, work.rank_load(load, c.shape), c, most)
    other = replace(problem, sections={**problem.sections, section: tuple(candidates)})
    try:
        evaluate_assignment(other, plan.assignment)
    except ValueError:  # it exceeds memory
        return None
    return other


def _samples_of_replica(work: Workload, section: str, dp: int) -> int:
    """The most samples that a replica has if all have as many."""
    return -(-work.active_sample_count(work.loads[section]) // dp)
