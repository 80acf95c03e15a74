"""Lets replicas that wait for each other form larger micro-batches, by the scheduled step.

Replicas that exchange tokens with each other, or gather parameters, run their micro-batches in rounds, and
closed forms take each micro-batch to be as large as it may be: with four samples in each, a round takes as
long as the four that are longest together, and a step a few such rounds. But the size is a limit. The
scheduler forms smaller micro-batches where these make rounds more equal, and larger ones of short samples,
which read the weights of experts once for all of them. So a larger limit costs memory, and seldom time. The
best plan is therefore scheduled with larger limits of one section after the other, until none of them makes
the step shorter: on the first batch, and on all batches if it takes no longer there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from secc.alloc.problem.build_problem import price_edges
from secc.alloc.problem.candidates import price_fitting_candidates
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.types import Assignment, Candidate, Problem
from secc.alloc.problem.workload import Workload
from secc.alloc.refine.local_search import STEP_RESOLUTION, RefinedPlan
from secc.alloc.refine.prefetch_memory import with_prefetch_buffers
from secc.alloc.refine.schedule_evaluation import GroupRanks, PlanEvaluator

RATIOS = (2, 4)  # of the tried limit to the plan's
MOST_PASSES = 4  # over all sections


@dataclass(frozen=True)
class EnlargedPlan:
    """A plan after the choice, with its problem. `step_ns`: by section with a larger limit, the scheduled
    step with the plan's limit and each larger one that was taken, in the order in which they were."""

    problem: Problem
    refined: RefinedPlan
    step_ns: Mapping[str, Mapping[int, int]] = field(default_factory=dict[str, Mapping[int, int]])


def enlarge_micro_batches(
    evaluator: PlanEvaluator, won: RefinedPlan, ranks: GroupRanks, pins: Pins
) -> EnlargedPlan | None:
    """Returns the plan in which sections with replicas in lockstep have the limits that make the scheduled
    step shortest, in a problem of its candidates alone; None where no other limit is better. What is pinned
    stays as it is."""
    chosen = {s: evaluator.problem.sections[s][i] for s, i in won.assignment.choice.items()}
    best = replace(won, assignment=replace(won.assignment, choice=dict.fromkeys(chosen, 0)))
    evaluator, found = evaluator.with_problem(_problem_of(evaluator, chosen)), None
    step_ns = dict[str, dict[int, int]]()
    for _ in range(MOST_PASSES):
        before = best
        for section, ratio in ((s, r) for s in chosen for r in RATIOS):
            larger = _with_larger_limit(evaluator, best.assignment, section, ratio, pins)
            if larger is None:
                continue
            tried = evaluator.with_problem(larger)
            now, first = evaluator.evaluate_in_problems([larger], best.assignment, ranks)
            if not first.fits or first.time_ns > now.time_ns:
                continue
            evaluation, tries = tried.evaluate(best.assignment, ranks), best.evaluated_plans + 1
            saved_ns = best.evaluation.time_ns - evaluation.time_ns
            if evaluation.fits and saved_ns * STEP_RESOLUTION > evaluation.time_ns:
                before_size, size = (p.sections[section][0].micro_batch for p in (evaluator.problem, larger))
                steps = step_ns.setdefault(section, {before_size: best.evaluation.time_ns})
                steps[size] = evaluation.time_ns
                ns = evaluate_assignment(larger, best.assignment).time_ns
                best = replace(best, evaluation=evaluation, closed_form_ns=ns, evaluated_plans=tries)
                evaluator, found = tried, EnlargedPlan(larger, best, step_ns)
        if best is before:
            break
    return found


def _problem_of(evaluator: PlanEvaluator, chosen: Mapping[str, Candidate]) -> Problem:
    """The problem with one candidate for each section."""
    sections = {s: (c,) for s, c in chosen.items()}
    problem = replace(evaluator.problem, sections=sections, edges=price_edges(evaluator.work, sections))
    return with_prefetch_buffers(problem, evaluator.work, evaluator.run_ahead)


def _with_larger_limit(
    evaluator: PlanEvaluator, plan: Assignment, section: str, ratio: int, pins: Pins
) -> Problem | None:
    """The problem in which a section's candidate may have `ratio` times as many samples in a micro-batch;
    None where it has no replicas in lockstep, or pins, samples or memory do not allow that."""
    chosen = {s: evaluator.problem.sections[s][0] for s in plan.choice}
    c = chosen[section]
    if not c.runs_in_lockstep or c.cp_per != "section" or c.micro_batch_tokens or c.sample_limit:
        return None
    if pins.pinned_number(section, "micro_batch") is not None:
        return None
    work = evaluator.work.for_kind(c.kind)
    usable = evaluator.problem.usable_bytes(c)
    if (larger := _price_limit(work, section, c, ratio * c.micro_batch, usable)) is None:
        return None
    problem = _problem_of(evaluator, chosen | {section: larger})
    try:
        evaluate_assignment(problem, plan)
    except ValueError:  # it exceeds memory
        return None
    return problem


def _price_limit(work: Workload, section: str, c: Candidate, size: int, usable: int) -> Candidate | None:
    """The candidate with micro-batches of up to `size` samples, None where no replica has as many samples or
    a rank lacks the memory. It takes no longer than with smaller ones, which may still be formed."""
    load = work.loads[section]
    if size > -(-work.active_sample_count(load) // c.dp):
        return None
    rank = work.rank_load(load, c.shape)
    priced = price_fitting_candidates(work, rank, c.dp, size, c.sharding, c.recompute, usable)
    if not priced:
        return None
    found = replace(max(priced, key=lambda o: o.in_flight), kind=c.kind, runs_ahead=c.runs_ahead)
    return found if found.time_ns <= c.time_ns else replace(found, time_ns=c.time_ns, idle_ns=c.idle_ns)
