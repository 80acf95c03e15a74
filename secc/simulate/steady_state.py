"""Steps in a sequence, for plans with cross-step prefetch (`runtime/schedule/cross_step_prefetch.py`): a
single step neither finds results of the step before nor computes any for the next one."""

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
    """Yields a step for each batch, as if the batches repeated in a cycle: the long-run behaviour."""
    return _spliced_steps(plan, batches, order, wraps=True)


def consecutive_steps(
    plan: Plan, batches: Sequence[BatchSamples], order: str = "wavefront"
) -> Iterator[ScheduledBatch]:
    """Yields the steps of a run that has these batches and no others."""
    return _spliced_steps(plan, batches, order, wraps=False)


def _spliced_steps(
    plan: Plan, batches: Sequence[BatchSamples], order: str, wraps: bool
) -> Iterator[ScheduledBatch]:
    schedules = [schedule_batch(plan, samples, order=order) for samples in batches]
    for k, samples in enumerate(batches):
        next_index = (k + 1) % len(batches)
        next_schedule = schedules[next_index] if wraps or next_index else None
        spliced = splice_prefetch(plan, schedules[k], len(samples), next_schedule, warm=wraps or k > 0)
        yield (
            (
                tuple(samples)
                if next_schedule is None or not next_schedule.prefetchable
                else (*samples, *batches[next_index])
            ),
            spliced,
        )
