"""Bounds the mean step of many where sections prefetch for the next step
(`runtime/schedule/cross_step_prefetch.py`).

Take any number of steps with global batches that repeat in a cycle. Each step takes at least as long as the
sections without prefetch need for its batch, even if all prefetched results are ready when it starts
(`secc/bounds/bounds.py`). And over the whole cycle the prefetching ranks must do the work of all its batches,
in whichever step. So the mean step takes at least the larger of two means: of the steps' own bounds, and of
the batches' work on those ranks. (The larger of both in each step would not be a bound: a batch with much
work to prefetch may find time in an earlier step with little.)
"""

from __future__ import annotations

from collections.abc import Sequence

from secc.bounds.bounds import LowerBound, bound_without_prefetch, prefetch_work_bounds
from secc.bounds.work import BatchWork


def mean_step_bound(works: Sequence[BatchWork]) -> LowerBound:
    """Lower bound on the mean step over global batches that repeat in a cycle; without prefetch the mean
    of their bounds."""
    steps = [bound_without_prefetch(work) for work in works]
    candidates = [LowerBound(sum(b.ns for b in steps) // len(works), steps[-1].reason)]
    for pools in zip(*(prefetch_work_bounds(work) for work in works), strict=True):
        candidates.append(LowerBound(sum(b.ns for b in pools) // len(works), pools[-1].reason))
    return max(candidates, key=lambda b: b.ns)
