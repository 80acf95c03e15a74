"""List scheduling in virtual time: every rank, whenever it is free, starts the most urgent job whose predecessors are done.

Jobs are numbers and their properties are lists, because a step has thousands of them and every rank runs this before every step. Times are
integer nanoseconds and no two jobs are equally urgent, so every run of it gives the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass
class Jobs:
    """The jobs of a step. `priority` is a permutation of their numbers: the job with the least goes first.

    `duration` in ns; `successors` wait for a job, which itself waits for `waits` others.
    """

    ranks: int
    rank: list[int] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def before(self, first: int, then: int) -> None:
        """Make job `then` wait for job `first`."""
        self.successors[first].append(then)
        self.waits[then] += 1


def run(jobs: Jobs) -> tuple[list[int], int]:
    """The jobs in the order in which they start, over all ranks, and when the last one ends.

    Raises ValueError if jobs wait for each other in a circle.
    """
    rank, duration, priority, successors = jobs.rank, jobs.duration, jobs.priority, jobs.successors
    waits = jobs.waits.copy()
    by_priority = [0] * len(priority)
    for job, place in enumerate(priority):
        by_priority[place] = job
    bits = max(1, len(priority)).bit_length()
    mask = (1 << bits) - 1
    ready: list[list[int]] = [[] for _ in range(jobs.ranks)]  # priorities of the jobs that may start
    for job, count in enumerate(waits):
        if not count:
            heappush(ready[rank[job]], priority[job])
    free = [True] * jobs.ranks
    ends: list[int] = []  # (time << bits) + job, which orders by time
    order: list[int] = []
    time, touched = 0, list(range(jobs.ranks))
    while True:
        for r in touched:
            if free[r] and ready[r]:
                job = by_priority[heappop(ready[r])]
                free[r] = False
                order.append(job)
                heappush(ends, (time + duration[job] << bits) + job)
        if not ends:
            break
        time = ends[0] >> bits
        touched = []
        while ends and ends[0] >> bits == time:
            job = heappop(ends) & mask
            r = rank[job]
            free[r] = True
            touched.append(r)
            for then in successors[job]:
                waits[then] -= 1
                if not waits[then]:
                    r = rank[then]
                    heappush(ready[r], priority[then])
                    touched.append(r)
    if len(order) < len(priority):
        raise ValueError(f"{len(priority) - len(order)} jobs wait for each other in a circle")
    return order, time
