"""Lower bound on the step time of fixed micro-batches. Layouts with a bound above the best known step are
skipped without scheduling them.

A rank does all its work. A later stage starts no sooner than the shortest micro-batch has passed the earlier
ones, and is followed by the earlier stages' backwards, unless its own backwards are split: then weight
gradients, for which nothing waits, may end the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import replica_first_ranks, weight_backward_times
from secc.runtime.schedule.batch_packing import AssignedMicroBatches


def layout_lower_bound(plan: Plan, costs: PredictedCosts, cuts: Mapping[str, AssignedMicroBatches]) -> int:
    """Returns ns that no order of these micro-batches can beat. `cuts` has the micro-batches by whole
    section."""
    busy: defaultdict[int, int] = defaultdict(int)  # by the first rank of a replica
    stage_bound = 0
    for name, stages in plan.pipelines.items():
        replicas, lots = [r for r, _ in cuts[name]], [lot for _, lot in cuts[name]]
        head, tail = [0] * len(lots), [0] * len(lots)  # what earlier stages take before and after
        for s in stages:
            forward, backward = costs.micro_batch_times(s, lots)
            ranks = replica_first_ranks(s)
            work, shortest_before, shortest_after = ([0] * len(ranks), dict[int, int](), dict[int, int]())
            for r, f, b, head_ns, tail_ns in zip(replicas, forward, backward, head, tail, strict=True):
                work[r] += f + b
                shortest_before[r] = min(shortest_before.get(r, head_ns), head_ns)
                shortest_after[r] = min(shortest_after.get(r, tail_ns), tail_ns)
            for r, rank in enumerate(ranks):
                busy[rank] += work[r]
                stage_bound = max(
                    stage_bound,
                    work[r]
                    + shortest_before.get(r, 0)
                    + (0 if s.weight_permille else shortest_after.get(r, 0)),
                )
            input_gradients = map(int.__sub__, backward, weight_backward_times(s, backward))
            head, tail = list(map(int.__add__, head, forward)), list(map(int.__add__, tail, input_gradients))
    return max(stage_bound, *busy.values(), 0)
