"""The least that a step of given micro-batches takes, without its order: what makes most layouts not worth
ordering.

A rank does all the work that it has. A stage behind others starts no sooner than the shortest micro-batch has
passed them, and is followed by what their backwards take, unless its own are split: then gradients of
weights, for which nobody waits, may end the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import replica_first_ranks, weight_backward_times
from secc.runtime.schedule.batch_packing import AssignedMicroBatches


def layout_lower_bound(plan: Plan, costs: PredictedCosts, cuts: Mapping[str, AssignedMicroBatches]) -> int:
    """Ns that no order of the micro-batches `cuts`, by whole sections, can beat."""
    busy: defaultdict[int, int] = defaultdict(int)  # by the first rank of a replica
    staged = 0
    for name, stages in plan.pipelines.items():
        replicas, lots = [r for r, _ in cuts[name]], [lot for _, lot in cuts[name]]
        head, tail = [0] * len(lots), [0] * len(lots)  # what earlier stages take before and after
        for s in stages:
            forward, backward = costs.micro_batch_times(s, lots)
            ranks = replica_first_ranks(s)
            work, first, last = ([0] * len(ranks), dict[int, int](), dict[int, int]())
            for r, f, b, before, after in zip(replicas, forward, backward, head, tail, strict=True):
                work[r] += f + b
                first[r] = min(first.get(r, before), before)
                last[r] = min(last.get(r, after), after)
            for r, rank in enumerate(ranks):
                busy[rank] += work[r]
                staged = max(staged, work[r] + first.get(r, 0) + (0 if s.weight_permille else last.get(r, 0)))
            awaited = map(int.__sub__, backward, weight_backward_times(s, backward))
            head, tail = list(map(int.__add__, head, forward)), list(map(int.__add__, tail, awaited))
    return max(staged, *busy.values(), 0)
