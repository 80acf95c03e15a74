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
from secc.runtime.schedule.cross_step_prefetch import spliced
from secc.runtime.training.rank_context import Run
from secc.runtime.validation.full_check import check


@dataclass(frozen=True)
class Step:
    """One step. `then` is the next global batch, None where nothing of it is computed."""

    batch: GlobalBatch
    then: GlobalBatch | None
    schedule: Schedule

    @property
    def samples(self) -> tuple[SampleMeta, ...]:
        """The samples that the schedule speaks of."""
        return self.batch.samples + (self.then.samples if self.then is not None else ())


def steps(run: Run, first: int, ahead: int = 0) -> Iterator[Step]:
    """The steps from number `first` (from 0) to the run's last one, each planned `ahead` steps before it is
    due."""
    look = run.plan.run_ahead_gib > 0
    drawn: deque[GlobalBatch] = deque()
    planned: deque[Step] = deque()
    number, latest = first, None
    for due in range(first, run.steps):
        while number < min(run.steps, due + 1 + ahead + look):
            with run.trace.event("METADATA", kind="METADATA"):
                drawn.append(run.data.next())
            number += 1
        while len(planned) < min(run.steps - due, 1 + ahead):
            with run.trace.event("PLAN", kind="PLAN"):
                latest = _planned(run, drawn.popleft(), drawn[0] if look and drawn else None, first, latest)
            planned.append(latest)
        yield planned.popleft()


def _planned(run: Run, batch: GlobalBatch, then: GlobalBatch | None, first: int, before: Step | None) -> Step:
    """The step of a batch. In the first one of the run nothing was computed ahead, after the last one nothing
    is needed.

    A step like the one before it has its schedule, which was checked then.
    """
    alone = run.order(batch.samples)
    coming = run.order(then.samples) if then is not None else None
    schedule = spliced(run.plan, alone, len(batch.samples), coming, warm=batch.step > first)
    step = Step(batch, then if coming is not None and coming.early else None, schedule)
    if before is None or before.schedule is not schedule:
        check(run.plan, step.samples, schedule)
    micros = [
        schedule.micro_batches[i.section][i.micro] for i in schedule.programs[run.rank] if i.kind == "F"
    ]
    micros = [m for m in micros if m.samples]
    run.data.prepare([(m.samples, m.section) for m in micros if not schedule.is_later(m)], batch)
    if step.then is not None:
        own = len(batch.samples)
        run.data.prepare(
            [(tuple(p - own for p in m.samples), m.section) for m in micros if schedule.is_later(m)],
            step.then,
        )
    return step
