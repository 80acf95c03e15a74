"""Chooses, for each pipeline of the best plan, whether its ranks hold one piece of the layers or two, and how
two lie on the ranks (in a loop, or in a V), by the scheduled step.

Two pieces shorten fill and drain, and cost memory for more micro-batches in flight and more messages. Closed
forms do not see what ragged micro-batches and memory make of that, so the best plan is scheduled with each
way: on the first batch, and on all batches if that is not clearly longer. Plans with other stages that are
close to it are estimated with two pieces, and evaluated where that promises a shorter step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from secc.alloc.problem.build_problem import count_cuttable_layers
from secc.alloc.problem.candidates import price_fitting_candidates
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.types import Assignment, Candidate, Problem
from secc.alloc.refine.local_search import DOES_NOT_FIT, FIRST_BATCH_MARGIN, RefinedPlan
from secc.alloc.refine.schedule_evaluation import GroupRanks, PlanEvaluator

CHUNKS = 2
PLACEMENTS = ("loop", "v")
# Evaluated steps of plans with and without chunks are up to 2% off the simulated ones on single batches, and
# 1% on the mean of several: what is shorter by less is not known to be shorter.
INTERLEAVING_MARGIN = 1 / 64


@dataclass(frozen=True)
class InterleavedPlan:
    """A plan after the choice, with its problem. `step_ns`: by section, the scheduled step under each way
    that was tried on all batches and fits, all other choices kept: "one", "loop" or "v". `dropped`: in the
    same form, how many times as long as the plan the others take on the first batch, DOES_NOT_FIT for a way
    without the memory."""

    problem: Problem
    refined: RefinedPlan
    step_ns: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    dropped: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])


def choose_interleaving(
    evaluator: PlanEvaluator, won: RefinedPlan, ranks: GroupRanks, pins: Pins
) -> InterleavedPlan:
    """Returns the plan in which each pipeline has as many pieces of layers on a rank as make the scheduled
    step shortest; two have to be shorter by `INTERLEAVING_MARGIN`. What is pinned or was refused stays as it
    is, and so does a pipeline that divides experts or deals its samples to ranks of cp."""
    step_ns, dropped = dict[str, dict[str, int]](), dict[str, dict[str, float]]()
    for section in won.assignment.choice:
        found = {"one": (won, evaluator)}
        for placement, problem in _interleave(evaluator, won.assignment, section, pins):
            tried = evaluator.with_problem(problem)
            first, now = (e.evaluate_first_batch(won.assignment, ranks) for e in (tried, evaluator))
            if not first.fits or first.time_ns > now.time_ns * (1 + FIRST_BATCH_MARGIN):
                ratio = round(first.time_ns / now.time_ns, 4) if first.fits else DOES_NOT_FIT
                dropped.setdefault(section, {})[placement] = ratio
                continue
            evaluation = tried.evaluate(won.assignment, ranks)
            if evaluation.fits:
                found[placement] = replace(won, evaluation=evaluation), tried
        if len(found) == 1:
            continue
        step_ns[section] = {way: plan.evaluation.time_ns for way, (plan, _) in found.items()}
        weighed = {"one": 1 - INTERLEAVING_MARGIN}
        best = min(found, key=lambda way: step_ns[section][way] * weighed.get(way, 1))
        (won, evaluator), tries = found[best], won.evaluated_plans + len(found) - 1
        closed_form_ns = evaluate_assignment(evaluator.problem, won.assignment).time_ns
        won = replace(won, closed_form_ns=closed_form_ns, evaluated_plans=tries)
    return InterleavedPlan(evaluator.problem, won, step_ns, dropped)


def interleave_close_plans(
    evaluator: PlanEvaluator,
    found: InterleavedPlan,
    plans: Sequence[Assignment],
    hand_out: Callable[[Problem, Assignment], GroupRanks],
    pins: Pins,
) -> InterleavedPlan:
    """Returns the best of a plan and of others with two pieces of layers on a rank, in the way in which their
    estimate is shortest. These have to be shorter by `INTERLEAVING_MARGIN`. `evaluator` is that of the
    problem in which all plans have one piece."""
    best_ns = (
        evaluator.with_problem(found.problem)
        .estimate(found.refined.assignment, hand_out(found.problem, found.refined.assignment))
        .time_ns
    )
    for a in plans:
        ranks = hand_out(evaluator.problem, a)
        ways = [
            (estimate.time_ns, section, way, tried)
            for section in a.choice
            for way, problem in _interleave(evaluator, a, section, pins)
            if (estimate := (tried := evaluator.with_problem(problem)).estimate(a, ranks)).fits
        ]
        ns, section, way, tried = min(ways, key=lambda found: found[:3], default=(best_ns, "", "", evaluator))
        if ns >= best_ns * (1 - INTERLEAVING_MARGIN):
            continue
        evaluation = tried.evaluate(a, ranks)
        tries = found.refined.evaluated_plans + 1
        if evaluation.is_better_than(found.refined.evaluation):
            refined = RefinedPlan(a, evaluation, evaluate_assignment(tried.problem, a).time_ns, tries)
            step_ns = {section: {way: evaluation.time_ns}}
            found, best_ns = InterleavedPlan(tried.problem, refined, step_ns, found.dropped), ns
    return found


def _interleave(
    evaluator: PlanEvaluator, plan: Assignment, section: str, pins: Pins
) -> Iterator[tuple[str, Problem]]:
    """Yields the problem in which a section's chosen candidate has two pieces of layers on a rank, for each
    placement that pins, layers and memory leave."""
    problem, index = evaluator.problem, plan.choice[section]
    c = problem.sections[section][index]
    work = evaluator.work.for_kind(c.kind)
    load = work.loads[section]
    if (
        c.pp == 1
        or c.chunks > 1
        or c.ep > 1
        or c.cp_per != "section"
        or load.mode == "forward"
        or pins.interleaving(section) is not None
        or f"{section}.chunks" in pins.refused
        or count_cuttable_layers(work, load) < CHUNKS * c.pp
    ):
        return
    for placement in PLACEMENTS:
        on_rank = work.rank_load(load, c.shape._replace(chunks=CHUNKS, placement=placement))
        capacity = problem.usable_bytes(c)
        options = price_fitting_candidates(
            work, on_rank, c.dp, c.micro_batch, c.sharding, c.recompute, capacity
        )
        fewer = [o for o in options if o.in_flight <= c.in_flight]
        if not fewer:
            continue
        interleaved = _keep_choices(max(fewer, key=lambda o: o.in_flight), c)
        candidates = list(problem.sections[section])
        candidates[index] = interleaved
        changed = replace(problem, sections={**problem.sections, section: tuple(candidates)})
        try:
            evaluate_assignment(changed, plan)
        except ValueError:  # it exceeds memory
            continue
        yield placement, changed


def _keep_choices(interleaved: Candidate, c: Candidate) -> Candidate:
    """The candidate with what `price_fitting_candidates` does not know of `c`."""
    return replace(
        interleaved,
        kind=c.kind,
        micro_batch_tokens=c.micro_batch_tokens,
        sample_limit=c.sample_limit,
        runs_ahead=c.runs_ahead,
    )
