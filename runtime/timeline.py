"""List scheduling in virtual time: every rank, whenever it is free, starts the most urgent job whose predecessors are done.

Times are integer nanoseconds and ties are broken by position, so every run of it gives the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Job:
    """F or B of a section's micro-batch on a rank, for `duration` ns. Lower `priority` goes first, then lower `index`.

    `successors` wait for this job; it waits for `waits_for` others.
    """

    index: int
    kind: str
    section: str
    micro: int
    rank: int
    duration: int
    priority: tuple[int, ...]
    successors: list[Job] = field(default_factory=list)
    waits_for: int = 0

    def before(self, other: Job) -> None:
        """Make `other` wait for this job."""
        self.successors.append(other)
        other.waits_for += 1


@dataclass(frozen=True)
class Timeline:
    """The jobs in the order in which they start, over all ranks, and the time at which the last one ends."""

    order: tuple[Job, ...]
    makespan: int


def run(jobs: Sequence[Job], ranks: int) -> Timeline:
    """Run the jobs, each at its index, on ranks 0 .. ranks-1, using up `waits_for`. Raises ValueError if they wait in a circle."""
    ready: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(ranks)]
    for job in jobs:
        if not job.waits_for:
            heapq.heappush(ready[job.rank], (job.priority, job.index))
    free = [True] * ranks
    ends: list[tuple[int, int]] = []
    order: list[Job] = []
    time, touched = 0, set(range(ranks))
    while True:
        for rank in sorted(touched):
            if free[rank] and ready[rank]:
                job = jobs[heapq.heappop(ready[rank])[1]]
                order.append(job)
                free[rank] = False
                heapq.heappush(ends, (time + job.duration, job.index))
        if not ends:
            break
        time, touched = ends[0][0], set()
        while ends and ends[0][0] == time:
            job = jobs[heapq.heappop(ends)[1]]
            free[job.rank] = True
            touched |= {job.rank, *_release(job, ready)}
    if len(order) < len(jobs):
        raise ValueError(f"{len(jobs) - len(order)} jobs wait for each other in a circle")
    return Timeline(tuple(order), time)


def _release(job: Job, ready: list[list[tuple[tuple[int, ...], int]]]) -> list[int]:
    """Tell the successors that the job is done; the ranks of those that are now ready."""
    ranks: list[int] = []
    for successor in job.successors:
        successor.waits_for -= 1
        if not successor.waits_for:
            heapq.heappush(ready[successor.rank], (successor.priority, successor.index))
            ranks.append(successor.rank)
    return ranks
