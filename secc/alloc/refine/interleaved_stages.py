"""Chooses, for each pipeline of the best plan, whether its ranks hold one piece of the layers or two, how two
lie on the ranks (in a loop, or in a V), and with cp whether one piece splits its backward, by the scheduled
step.

Two pieces, and a split backward, shorten fill and drain. Two pieces cost memory for more micro-batches in
flight and more messages, a split backward memory between its parts and sums over tp in the open. Closed forms
do not see what ragged micro-batches and memory make of that, so the best plan is scheduled with each way: on
the first batch, and on all batches if that is not clearly longer than a way has to be. Plans with other
stages that are close to it are estimated with these ways, and evaluated where that promises a shorter step.
Without cp, candidates of the solver have split backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from secc import process_map
from secc.alloc.problem.allowed_choices import may_split_backward
from secc.alloc.problem.build_problem import count_cuttable_layers
from secc.alloc.problem.candidates import price_fitting_candidates
from secc.alloc.problem.closed_form import evaluate_assignment
from secc.alloc.problem.dealt_prices import DealtPrices
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.types import Assignment, Candidate, Problem, ReplicaShape
from secc.alloc.problem.workload import Workload
from secc.alloc.refine.local_search import DOES_NOT_FIT, FIRST_BATCH_MARGIN, RefinedPlan
from secc.alloc.refine.schedule_evaluation import GroupRanks, PlanEvaluator

ONE, SPLIT, PLACEMENTS = "one", "split", ("loop", "v")  # ways to run a pipeline
CHUNKS = 2
# Evaluated steps of plans with and without chunks are up to 2% off the simulated ones on single batches, and
# 1% on the mean of several: what is shorter by less is not known to be shorter. A split backward is closer.
MARGINS = {ONE: 0, SPLIT: 1 / 500, **dict.fromkeys(PLACEMENTS, 1 / 64)}


@dataclass(frozen=True)
class InterleavedPlan:
    """A plan after the choice, with its problem. `step_ns`: by section, the scheduled step under each way
    that was tried on all batches and fits, all other choices kept: "one", "split", "loop" or "v". `dropped`:
    in the same form, how many times as long as the plan the others take on the first batch, DOES_NOT_FIT for
    a way without the memory."""

    problem: Problem
    refined: RefinedPlan
    step_ns: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])
    dropped: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])


def choose_interleaving(
    evaluator: PlanEvaluator, won: RefinedPlan, ranks: GroupRanks, pins: Pins
) -> InterleavedPlan:
    """Returns the plan in which each pipeline has as many pieces of layers on a rank, and parts of a
    backward, as make the scheduled step shortest; two have to be shorter by the way's share of `MARGINS`.
    What is pinned or was refused stays as it is, and so does a pipeline that divides experts, and the pieces
    of one that deals its samples to ranks of cp."""
    step_ns, dropped = dict[str, dict[str, int]](), dict[str, dict[str, float]]()
    for section in won.assignment.choice:
        found = {ONE: (won, evaluator)}
        if not (ways := dict(_other_ways(evaluator, won.assignment, section, pins))):
            continue
        now, *firsts = evaluator.evaluate_in_problems([*ways.values()], won.assignment, ranks)
        for (way, problem), first in zip(ways.items(), firsts, strict=True):
            tried = evaluator.with_problem(problem)
            most = now.time_ns * (1 + FIRST_BATCH_MARGIN) * (1 - MARGINS[way])
            if not first.fits or first.time_ns > most:
                ratio = round(first.time_ns / now.time_ns, 4) if first.fits else DOES_NOT_FIT
                dropped.setdefault(section, {})[way] = ratio
                continue
            evaluation = tried.evaluate(won.assignment, ranks)
            if evaluation.fits:
                found[way] = replace(won, evaluation=evaluation), tried
        if len(found) == 1:
            continue
        step_ns[section] = {way: plan.evaluation.time_ns for way, (plan, _) in found.items()}
        best = min(found, key=lambda way: step_ns[section][way] / (1 - MARGINS[way]))
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
    """Returns the best of a plan and of others with pipelines that run in the way in which their estimate is
    shortest. These have to be shorter by the way's share of `MARGINS`. `evaluator` is that of the problem in
    which all plans have one piece."""
    best_ns = (
        evaluator.with_problem(found.problem)
        .estimate_once(found.refined.assignment, hand_out(found.problem, found.refined.assignment))
        .time_ns
    )
    options = [
        (number, section, way, evaluator.with_problem(problem))
        for number, a in enumerate(plans)
        for section in a.choice
        for way, problem in _other_ways(evaluator, a, section, pins)
    ]
    ranks = [hand_out(evaluator.problem, a) for a in plans]
    estimates = process_map.map_in_processes(
        lambda option: option[3].estimate(plans[option[0]], ranks[option[0]]), options
    )
    for number, a in enumerate(plans):
        ways = [
            (estimate.time_ns, section, way, tried)
            for estimate, (of_plan, section, way, tried) in zip(estimates, options, strict=True)
            if of_plan == number and estimate.fits
        ]
        ns, section, way, tried = min(ways, key=lambda found: found[:3], default=(best_ns, "", "", evaluator))
        if ns >= best_ns * (1 - MARGINS.get(way, 0)):
            continue
        evaluation = tried.evaluate(a, ranks[number])
        tries = found.refined.evaluated_plans + 1
        if evaluation.is_better_than(found.refined.evaluation):
            refined = RefinedPlan(a, evaluation, evaluate_assignment(tried.problem, a).time_ns, tries)
            step_ns = {section: {way: evaluation.time_ns}}
            found, best_ns = InterleavedPlan(tried.problem, refined, step_ns, found.dropped), ns
    return found


def _other_ways(
    evaluator: PlanEvaluator, plan: Assignment, section: str, pins: Pins
) -> Iterator[tuple[str, Problem]]:
    """Yields, for each way to run a section's chosen candidate that pins, layers and memory leave, the
    problem in which it runs so."""
    problem, index = evaluator.problem, plan.choice[section]
    c = problem.sections[section][index]
    work = evaluator.work.for_kind(c.kind)
    load = work.loads[section]
    if c.pp == 1 or c.chunks > 1 or load.mode == "forward":
        return
    shapes: dict[str, ReplicaShape] = {}
    if _may_split(load, c, pins):
        shapes[SPLIT] = c.shape._replace(backward_parts=2)
    if _may_interleave(work, load, c, pins):
        shapes |= {way: c.shape._replace(chunks=CHUNKS, placement=way) for way in PLACEMENTS}
    for way, shape in shapes.items():
        priced = price_fitting_candidates(
            work,
            work.rank_load(load, shape),
            c.dp,
            c.micro_batch,
            c.sharding,
            c.recompute,
            problem.usable_bytes(c),
        )
        fewer = [o for o in priced if o.in_flight <= c.in_flight]
        if not fewer:
            continue
        changed = _keep_choices(max(fewer, key=lambda o: o.in_flight), c)
        if c.cp_per != "section":
            changed = DealtPrices(work, load).price_as_dealt(changed, c.cp_degrees)
        candidates = list(problem.sections[section])
        candidates[index] = changed
        other = replace(problem, sections={**problem.sections, section: tuple(candidates)})
        try:
            evaluate_assignment(other, plan)
        except ValueError:  # it exceeds memory
            continue
        yield way, other


def _may_split(load: SectionLoad, c: Candidate, pins: Pins) -> bool:
    """Whether the stages of a candidate with cp may split their backward; without cp the solver chooses."""
    return c.cp > 1 and c.backward_parts == 1 and may_split_backward(load, c.shape, c.sharding, pins)


def _may_interleave(work: Workload, load: SectionLoad, c: Candidate, pins: Pins) -> bool:
    """Whether the ranks of a pipeline may hold two pieces of its layers each."""
    return (
        c.ep == 1
        and c.cp_per == "section"
        and pins.interleaving(load.name) is None
        and f"{load.name}.chunks" not in pins.refused
        and count_cuttable_layers(work, load) >= CHUNKS * c.pp
    )


def _keep_choices(priced: Candidate, c: Candidate) -> Candidate:
    """The candidate with what `price_fitting_candidates` does not know of `c`."""
    return replace(
        priced,
        kind=c.kind,
        micro_batch_tokens=c.micro_batch_tokens,
        sample_limit=c.sample_limit,
        runs_ahead=c.runs_ahead,
    )
