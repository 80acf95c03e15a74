"""The bound on the mean time of a step among many, where sections run ahead of the step
(`runtime/schedule/cross_step_prefetch.py`).

Take any number of steps whose global batches come round and round. Each step takes at least as long as the
rest of the plan's sections need for its batch, even if all that runs ahead is there when it starts
(`secc/bounds/bounds.py`). And over the whole round the ranks that run ahead must have done the work of all
its batches, whichever steps they did it in. So the mean step takes at least the larger of two means: of the
steps' own bounds, and of the batches' work on those ranks. (The larger of both for each step would be no
bound: a batch with much to do ahead may find time in a step before it that has little.)
"""

from __future__ import annotations

from collections.abc import Sequence

from secc.bounds.bounds import LowerBound, bound_without_prefetch, prefetch_work_bounds
from secc.bounds.work import BatchWork


def mean_step_bound(works: Sequence[BatchWork]) -> LowerBound:
    """A lower bound on the mean step in ns, over global batches that come round and round; without run-ahead
    the mean of their bounds."""
    steps = [bound_without_prefetch(work) for work in works]
    candidates = [LowerBound(sum(b.ns for b in steps) // len(works), steps[-1].reason)]
    for pools in zip(*(prefetch_work_bounds(work) for work in works), strict=True):
        candidates.append(LowerBound(sum(b.ns for b in pools) // len(works), pools[-1].reason))
    return max(candidates, key=lambda b: b.ns)
