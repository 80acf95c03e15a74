"""Steps among others, for sections that run ahead (`runtime/schedule/cross_step_prefetch.py`): a step alone
neither finds what was computed in the step before nor computes anything for the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta, Schedule
from secc.runtime.schedule.cross_step_prefetch import splice_prefetch
from secc.runtime.schedule.scheduler import schedule_batch

BatchSamples = Sequence[SampleMeta]
ScheduledBatch = tuple[tuple[SampleMeta, ...], Schedule]  # the samples that the schedule speaks of


def steady_state_steps(
    plan: Plan, batches: Sequence[BatchSamples], order: str = "wavefront"
) -> Iterator[ScheduledBatch]:
    """A step for each batch, as if the batches came round and round: what a run does in the long run."""
    return _spliced_steps(plan, batches, order, wraps=True)


def consecutive_steps(
    plan: Plan, batches: Sequence[BatchSamples], order: str = "wavefront"
) -> Iterator[ScheduledBatch]:
    """The steps of a run that has these batches and no others."""
    return _spliced_steps(plan, batches, order, wraps=False)


def _spliced_steps(
    plan: Plan, batches: Sequence[BatchSamples], order: str, wraps: bool
) -> Iterator[ScheduledBatch]:
    alone = [schedule_batch(plan, samples, order=order) for samples in batches]
    for k, samples in enumerate(batches):
        then = (k + 1) % len(batches)
        coming = alone[then] if wraps or then else None
        found = splice_prefetch(plan, alone[k], len(samples), coming, warm=wraps or k > 0)
        yield (
            (tuple(samples) if coming is None or not coming.prefetchable else (*samples, *batches[then])),
            found,
        )
