"""Gives ranks of pipelines several chunks of layers where the scheduled step is shorter.

Closed forms know too little of ragged micro-batches to tell whether chunks pay: a micro-batch fills and
drains the ranks in smaller pieces, but passes more of them, and more are in flight. So the solver and the
local search work with one stage on a rank, and the plan that they found is scheduled once more for each
number of chunks and each placement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from secc.alloc.problem.candidates import Workload, price_candidate, require_rank_load
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.types import Candidate, Problem
from secc.alloc.refine.local_search import RefinedPlan
from secc.alloc.refine.schedule_evaluation import GroupRanks, PlanEvaluator
from secc.errors import UserError

INTERLEAVINGS = ((2, "loop"), (2, "v"), (4, "loop"))


def interleave_where_shorter(
    evaluator: PlanEvaluator, won: RefinedPlan, ranks: GroupRanks, pins: Pins, margin: float
) -> tuple[Problem, RefinedPlan]:
    """Returns the problem and the plan, with candidates of several chunks on a rank where that makes the
    scheduled step shorter by more than the share `margin` and fits. What is pinned stays as it is, and so do
    sections that feed others."""
    for section, index in won.assignment.choice.items():
        before = evaluator.problem
        variants = _list_variants(evaluator.work, before.sections[section][index], section, pins)
        least_ns = (1 - margin) * won.evaluation.time_ns
        for variant in variants:
            candidates = list(before.sections[section])
            candidates[index] = variant
            interleaved = replace(before, sections={**before.sections, section: tuple(candidates)})
            tried = PlanEvaluator(evaluator.work, interleaved, evaluator.run_ahead)
            found = tried.evaluate(won.assignment, ranks)
            won = replace(won, evaluated_plans=won.evaluated_plans + 1)
            if found.fits and found.time_ns < least_ns:
                evaluator, least_ns = tried, found.time_ns
                won = replace(won, evaluation=found)
    return evaluator.problem, won


def _list_variants(work: Workload, c: Candidate, section: str, pins: Pins) -> Iterator[Candidate]:
    """Yields a candidate with several chunks on each of its ranks, in each way that is possible."""
    own = work.for_kind(c.kind)
    load = own.loads[section]
    pinned = any(pins.pinned_number(section, key) for key in ("pp", "chunks"))
    pinned = pinned or "placement" in pins.words.get(section, {})
    if (
        pinned
        or f"{section}.chunks" in pins.refused
        or c.pp == 1
        or load.mode == "forward"
        or section in own.producing_sections
    ):
        return
    for chunks, placement in INTERLEAVINGS:
        shape = c.shape._replace(chunks=chunks, placement=placement)
        try:
            rank = require_rank_load(own, load, shape, c.ranks)
        except UserError:  # there are fewer layers than stages
            continue
        priced = price_candidate(own, rank, c.dp, c.micro_batch, c.sharding, c.recompute)
        yield replace(
            priced,
            kind=c.kind,
            micro_batch_tokens=c.micro_batch_tokens,
            sample_limit=c.sample_limit,
        )
