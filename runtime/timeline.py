"""List scheduling in virtual time: every rank, whenever it is free, starts the most urgent job whose predecessors are done.

Jobs are numbers and their properties are lists, because a step has thousands of them and every rank runs this before every step. Times are
integer nanoseconds and no two jobs are equally urgent, so every run of it gives the same order.

Two more rules serve pipelines. A line of jobs *follows* another one: the first of them to start makes its follower the most urgent of
the line, and so on, so that both go in one order. And jobs of a *limit* take room on their rank that others give back when they end;
without room they do not start, unless nothing else could: room is a wish, so it can stop no step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass
class Jobs:
    """The jobs of a step. `priority` is a permutation of their numbers: the job with the least goes first.

    `duration` in ns; `successors` wait for a job, which itself waits for `waits` others. `followers` maps a job to (its follower, the
    line). `takes` and `gives` map jobs to the limit whose room they take or give back, `rooms` has the room of each limit on a rank.
    """

    ranks: int
    rank: list[int] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    followers: dict[int, tuple[int, int]] = field(default_factory=dict)
    lines: list[list[int]] = field(default_factory=list)  # the priorities that the followers of a line have, most urgent first
    takes: dict[int, int] = field(default_factory=dict)
    gives: dict[int, int] = field(default_factory=dict)
    rooms: list[int] = field(default_factory=list)

    def before(self, first: int, then: int) -> None:
        """Make job `then` wait for job `first`."""
        self.successors[first].append(then)
        self.waits[then] += 1

    def follow(self, first: Sequence[int], then: Sequence[int]) -> None:
        """Make the jobs `then` go in the order of the jobs `first`, each of which its follower waits for. Priorities must be there."""
        self.followers |= {a: (b, len(self.lines)) for a, b in zip(first, then, strict=True)}
        self.lines.append(sorted(self.priority[job] for job in then))

    def limit(self, room: int, takes: Sequence[int], gives: Sequence[int]) -> None:
        """Give the jobs `takes` room for so many on a rank, each until a job of `gives` has ended there."""
        self.takes |= dict.fromkeys(takes, len(self.rooms))
        self.gives |= dict.fromkeys(gives, len(self.rooms))
        self.rooms.append(room)


def run(jobs: Jobs) -> tuple[list[int], int]:
    """The jobs in the order in which they start, over all ranks, and when the last one ends.

    Raises ValueError if jobs wait for each other in a circle.
    """
    return _Run(jobs).run()


class _Run:
    """One run: which jobs may start on each rank, by urgency, and which are kept back for want of room."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs, self.waits = jobs, jobs.waits.copy()
        self.priority, self.by_priority = jobs.priority, [0] * len(jobs.priority)
        for job, place in enumerate(jobs.priority):
            self.by_priority[place] = job
        if jobs.followers:
            self.priority, self.started = self.priority.copy(), [0] * len(jobs.lines)
        self.ready: list[list[int]] = [[] for _ in range(jobs.ranks)]  # priorities of the jobs that may start
        self.taken: Counter[tuple[int, int]] = Counter()  # room of a limit on a rank
        self.kept: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def run(self) -> tuple[list[int], int]:
        jobs, waits, ready = self.jobs, self.waits, self.ready
        rank, duration, successors, gives = jobs.rank, jobs.duration, jobs.successors, jobs.gives
        priority = self.priority
        bits = max(1, len(priority)).bit_length()
        mask = (1 << bits) - 1
        for job, count in enumerate(waits):
            if not count:
                heappush(ready[rank[job]], priority[job])
        free = [True] * jobs.ranks
        ends: list[int] = []  # (time << bits) + job, which orders by time
        order: list[int] = []
        time, touched = 0, list(range(jobs.ranks))
        bound = bool(jobs.followers or jobs.takes)
        while True:
            for r in touched:
                if free[r] and ready[r]:
                    job = self.by_priority[heappop(ready[r])]
                    if bound and (job := self.start(r, job)) < 0:
                        continue
                    free[r] = False
                    order.append(job)
                    heappush(ends, (time + duration[job] << bits) + job)
            if not ends:
                if (r := self.make_room()) < 0:
                    break
                touched = [r]
                continue
            time = ends[0] >> bits
            touched = []
            while ends and ends[0] >> bits == time:
                job = heappop(ends) & mask
                r = rank[job]
                free[r] = True
                touched.append(r)
                if bound and job in gives:
                    self.give((gives[job], r))
                for then in successors[job]:
                    waits[then] -= 1
                    if not waits[then]:
                        r = rank[then]
                        heappush(ready[r], priority[then])
                        touched.append(r)
        if len(order) < len(priority):
            raise ValueError(f"{len(priority) - len(order)} jobs wait for each other in a circle")
        return order, time

    def start(self, r: int, job: int) -> int:
        """The most urgent job of rank `r` that has room, from `job` on, or -1; its follower gets the line's next priority."""
        takes = self.jobs.takes
        while (limit := takes.get(job, -1)) >= 0 and self.taken[limit, r] >= self.jobs.rooms[limit]:
            heappush(self.kept[limit, r], self.priority[job])
            if not self.ready[r]:
                return -1
            job = self.by_priority[heappop(self.ready[r])]
        if limit >= 0:
            self.taken[limit, r] += 1
        if job in self.jobs.followers:
            then, line = self.jobs.followers[job]
            place = self.jobs.lines[line][self.started[line]]
            self.started[line] += 1
            self.priority[then], self.by_priority[place] = place, then
        return job

    def give(self, room: tuple[int, int]) -> None:
        """There is room again, for the most urgent job that was kept back."""
        self.taken[room] -= 1
        if self.kept[room]:
            heappush(self.ready[room[1]], heappop(self.kept[room]))

    def make_room(self) -> int:
        """Nothing runs: let the most urgent of the jobs that were kept back start. Its rank, or -1 if there is none."""
        room = min((room for room, kept in self.kept.items() if kept), key=lambda room: self.kept[room][0], default=None)
        if room is None:
            return -1
        self.give(room)
        return room[1]
