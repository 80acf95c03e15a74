"""Plans the steps of a run in order: each with its global batch, its schedule, and the next batch if part of
it is prefetched.

Every rank draws the same batches and plans the same schedules. A schedule is checked here, before any rank
starts on it, and this rank's micro-batches are announced to its loader in the order of their use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from secc.runtime.data.data_plane import DataPlane, GlobalBatch
from secc.runtime.errors import UserError
from secc.runtime.monitoring.chrome_trace import ChromeTrace
from secc.runtime.plan.dealt_samples import DealtMicroBatches
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta, Schedule
from secc.runtime.schedule.cross_step_prefetch import splice_prefetch
from secc.runtime.schedule.memory_bound import EXCESS_REMEDY, describe_excess
from secc.runtime.schedule.scheduler import ScheduleCache
from secc.runtime.validation.full_check import check_schedule


class StepSource(Protocol):
    """What steps are planned from: the plan, this rank, its data, and the schedules of batches."""

    plan: Plan
    rank: int
    data_plane: DataPlane
    schedule_batch: ScheduleCache
    trace: ChromeTrace


@dataclass(frozen=True)
class PlannedStep:
    """One step. `next_batch` is the next global batch if part of it is computed in this step, else None."""

    batch: GlobalBatch
    next_batch: GlobalBatch | None
    schedule: Schedule

    @property
    def samples(self) -> tuple[SampleMeta, ...]:
        """The samples that the schedule refers to: those of the batch, followed by those of the next one."""
        return self.batch.samples + (self.next_batch.samples if self.next_batch is not None else ())


def plan_steps(context: StepSource, first: int, last: int, ahead: int = 0) -> Iterator[PlannedStep]:
    """Yields the steps from number `first` (counted from 0) up to, but without, `last`. Each is planned
    `ahead` steps before it is yielded."""
    prefetches = context.plan.run_ahead_gib > 0
    drawn: deque[GlobalBatch] = deque()
    planned: deque[PlannedStep] = deque()
    number, latest = first, None
    for due in range(first, last):
        while number < min(last, due + 1 + ahead + prefetches):
            with context.trace.record_event("METADATA", kind="METADATA"):
                drawn.append(context.data_plane.next_batch())
            number += 1
        while len(planned) < min(last - due, 1 + ahead):
            with context.trace.record_event("PLAN", kind="PLAN"):
                latest = _plan_step(
                    context, drawn.popleft(), drawn[0] if prefetches and drawn else None, first, latest
                )
            planned.append(latest)
        yield planned.popleft()


def _plan_step(
    context: StepSource,
    batch: GlobalBatch,
    then: GlobalBatch | None,
    first: int,
    previous: PlannedStep | None,
) -> PlannedStep:
    """Plans the step of `batch`; `then` is the next batch if sections may prefetch it. The first step of a
    run has nothing prefetched, the last one prefetches nothing.

    If the schedule is the same object as in the step `before`, it has been checked already. Raises UserError
    for samples that a rank has no memory for.
    """
    alone = context.schedule_batch(batch.samples)
    if alone.over_memory:
        found = describe_excess(alone.over_memory[0], batch.samples)
        raise UserError(f"step {batch.step + 1}: {found}", remedy=EXCESS_REMEDY)
    next_schedule = context.schedule_batch(then.samples) if then is not None else None
    schedule = splice_prefetch(
        context.plan, alone, len(batch.samples), next_schedule, warm=batch.step > first
    )
    step = PlannedStep(
        batch, then if next_schedule is not None and next_schedule.prefetchable else None, schedule
    )
    if previous is None or previous.schedule is not schedule:
        check_schedule(context.plan, step.samples, schedule)
    dealt = DealtMicroBatches(context.plan, step.samples, schedule.own_samples)
    micros = [
        dealt.own_part(schedule.micro_batches[i.section][i.micro], context.rank)
        for i in schedule.programs[context.rank]
        if i.kind == "F"
    ]
    micros = [m for m in micros if m.samples]
    for ahead, together in groupby(micros, schedule.is_of_next_batch):
        first_position = len(batch.samples) if ahead else 0
        context.data_plane.announce_micro_batches(
            [(tuple(p - first_position for p in m.samples), m.section) for m in together],
            step.next_batch if ahead else batch,
        )
    return step
