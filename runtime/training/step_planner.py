"""The steps of a run, planned in order: each with its global batch, its schedule, and the next batch where
part of that is computed ahead.

Every rank draws the same batches and plans the same schedules. A schedule is checked here, before any rank
starts on it, and the micro-batches of this rank are announced to its loader in the order in which they will
be asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from secc.runtime.data.data_plane import GlobalBatch
from secc.runtime.plan.step_program import SampleMeta, Schedule
from secc.runtime.schedule.cross_step_prefetch import splice_prefetch
from secc.runtime.training.rank_context import RankContext
from secc.runtime.validation.full_check import check_schedule


@dataclass(frozen=True)
class PlannedStep:
    """One step. `then` is the next global batch, None where nothing of it is computed."""

    batch: GlobalBatch
    next_batch: GlobalBatch | None
    schedule: Schedule

    @property
    def samples(self) -> tuple[SampleMeta, ...]:
        """The samples that the schedule speaks of."""
        return self.batch.samples + (self.next_batch.samples if self.next_batch is not None else ())


def plan_steps(run: RankContext, first: int, ahead: int = 0) -> Iterator[PlannedStep]:
    """The steps from number `first` (from 0) to the run's last one, each planned `ahead` steps before it is
    due."""
    look = run.plan.run_ahead_gib > 0
    drawn: deque[GlobalBatch] = deque()
    planned: deque[PlannedStep] = deque()
    number, latest = first, None
    for due in range(first, run.last_step):
        while number < min(run.last_step, due + 1 + ahead + look):
            with run.trace.record_event("METADATA", kind="METADATA"):
                drawn.append(run.data_plane.next_batch())
            number += 1
        while len(planned) < min(run.last_step - due, 1 + ahead):
            with run.trace.record_event("PLAN", kind="PLAN"):
                latest = _plan_step(run, drawn.popleft(), drawn[0] if look and drawn else None, first, latest)
            planned.append(latest)
        yield planned.popleft()


def _plan_step(
    run: RankContext, batch: GlobalBatch, then: GlobalBatch | None, first: int, before: PlannedStep | None
) -> PlannedStep:
    """The step of a batch. In the first one of the run nothing was computed ahead, after the last one nothing
    is needed.

    A step like the one before it has its schedule, which was checked then.
    """
    alone = run.schedule_batch(batch.samples)
    coming = run.schedule_batch(then.samples) if then is not None else None
    schedule = splice_prefetch(run.plan, alone, len(batch.samples), coming, warm=batch.step > first)
    step = PlannedStep(batch, then if coming is not None and coming.prefetchable else None, schedule)
    if before is None or before.schedule is not schedule:
        check_schedule(run.plan, step.samples, schedule)
    micros = [
        schedule.micro_batches[i.section][i.micro] for i in schedule.programs[run.rank] if i.kind == "F"
    ]
    micros = [m for m in micros if m.samples]
    run.data_plane.announce_micro_batches(
        [(m.samples, m.section) for m in micros if not schedule.is_of_next_batch(m)], batch
    )
    if step.next_batch is not None:
        own = len(batch.samples)
        run.data_plane.announce_micro_batches(
            [(tuple(p - own for p in m.samples), m.section) for m in micros if schedule.is_of_next_batch(m)],
            step.next_batch,
        )
    return step
