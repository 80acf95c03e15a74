"""List scheduling in virtual time: every rank, whenever it is free, starts the most urgent job whose predecessors are done.

Jobs are numbers and their properties are lists, because a step has thousands of them and every rank runs this before every step. Times are
integer nanoseconds and no two jobs are equally urgent, so every run of it gives the same order.

Two more rules serve pipelines. A line of jobs *follows* another one: the first of them to start makes its follower the most urgent of
the line, and so on, so that both go in one order. And jobs of a *limit* take room on their rank that others give back when they end;
without room they do not start, unless nothing else could: room is a wish, so it can stop no step.

Jobs that are *joined* run at the same time, one on each of several ranks, for as long as the longest of them. A rank that comes to one of
them before the others are free waits. Nothing can wait for ever: when no job runs, all ranks are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush


@dataclass
class Jobs:
    """The jobs of a step. `priority` is a permutation of their numbers: the job with the least goes first.

    `duration` in ns; `successors` wait for a job, which itself waits for `waits` others. `joined` maps a job to all that run at the same
    time, itself included. Where there are lines or limits, `followers` has each job's follower and `line_of` the line that this is in,
    `takes` and `gives` have the limit whose room a job takes or gives back, all -1 without one; `rooms` has the room of a limit on a rank.
    """

    ranks: int
    rank: list[int] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    followers: list[int] = field(default_factory=list)
    line_of: list[int] = field(default_factory=list)
    lines: list[list[int]] = field(default_factory=list)  # the priorities that the followers of a line have, most urgent first
    joined: dict[int, tuple[int, ...]] = field(default_factory=dict)
    takes: list[int] = field(default_factory=list)
    gives: list[int] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)

    def before(self, first: int, then: int) -> None:
        """Make job `then` wait for job `first`."""
        self.successors[first].append(then)
        self.waits[then] += 1

    def follow(self, first: Sequence[int], then: Sequence[int]) -> None:
        """Make the jobs `then` go in the order of the jobs `first`, each of which its follower waits for. All must have priorities."""
        self._bind()
        for a, b in zip(first, then, strict=True):
            self.followers[a], self.line_of[a] = b, len(self.lines)
        self.lines.append(sorted(self.priority[job] for job in then))

    def join(self, together: Sequence[int]) -> None:
        """Make these jobs, each on another rank, run at the same time."""
        self.joined |= dict.fromkeys(together, tuple(together))

    def limit(self, room: int, takes: Sequence[int], gives: Sequence[int]) -> None:
        """Give the jobs `takes` room for so many on a rank, each until a job of `gives` has ended there. All jobs must be there."""
        self._bind()
        for a, b in zip(takes, gives, strict=True):
            self.takes[a] = self.gives[b] = len(self.rooms)
        self.rooms.append(room)

    def _bind(self) -> None:
        if not self.followers:
            self.followers, self.line_of, self.takes, self.gives = ([-1] * len(self.rank) for _ in range(4))


def run(jobs: Jobs) -> tuple[list[int], int]:
    """The jobs in the order in which they start, over all ranks, and when the last one ends.

    Raises ValueError if jobs wait for each other in a circle.
    """
    return _Run(jobs).run()


class _Run:
    """One run: which jobs may start on each rank, by urgency, and which are kept back for want of room. A *slot* is a limit on a rank."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs, self.waits = jobs, jobs.waits.copy()
        self.priority, self.by_priority = jobs.priority, [0] * len(jobs.priority)
        for job, place in enumerate(jobs.priority):
            self.by_priority[place] = job
        self.free = [True] * jobs.ranks
        self.absent = {job: len(some) for job, some in jobs.joined.items() if job == some[0]}  # those that wait for others
        self.begun, self.held = set[int](), set[int]()  # joined jobs that have started; ranks that wait for others to be free
        if jobs.followers:
            self.priority = self.priority.copy()
        free_of_limits = [-1] * len(self.priority) if jobs.joined and not jobs.followers else []
        self.takes, self.gives, self.followers = (x or free_of_limits for x in (jobs.takes, jobs.gives, jobs.followers))
        self.started = [0] * len(jobs.lines)
        self.ready: list[list[int]] = [[] for _ in range(jobs.ranks)]  # priorities of the jobs that may start
        self.room = [room for room in jobs.rooms for _ in range(jobs.ranks)]  # by slot
        self.kept: defaultdict[int, list[int]] = defaultdict(list)  # priorities by slot

    def run(self) -> tuple[list[int], int]:
        jobs, waits, ready = self.jobs, self.waits, self.ready
        rank, duration, successors, gives = jobs.rank, jobs.duration, jobs.successors, self.gives
        priority, joined, free = self.priority, jobs.joined, self.free
        bits = max(1, len(priority)).bit_length()
        mask = (1 << bits) - 1
        for job, count in enumerate(waits):
            if not count and self.offered(job):
                heappush(ready[rank[job]], priority[job])
        ends: list[int] = []  # (time << bits) + job, which orders by time
        order: list[int] = []
        time, touched = 0, list(range(jobs.ranks))
        bound = bool(jobs.followers or joined)
        while True:
            for r in touched:
                if free[r] and ready[r]:
                    job = self.start(r) if bound else self.by_priority[heappop(ready[r])]
                    if job in joined:
                        end = time + max(duration[j] for j in joined[job]) << bits
                        for j in joined[job]:
                            free[rank[j]] = False
                            order.append(j)
                            heappush(ends, end + j)
                    elif job >= 0:
                        free[r] = False
                        order.append(job)
                        heappush(ends, (time + duration[job] << bits) + job)
            if not ends:
                if (r := self.make_room()) < 0:
                    break
                touched = [r]
                continue
            time = ends[0] >> bits
            touched = [*self.held]
            self.held.clear()
            while ends and ends[0] >> bits == time:
                job = heappop(ends) & mask
                r = rank[job]
                free[r] = True
                touched.append(r)
                if bound and gives[job] >= 0:
                    self.give(gives[job] * jobs.ranks + r)
                for then in successors[job]:
                    waits[then] -= 1
                    if not waits[then] and (then not in joined or self.offered(then)):
                        r = rank[then]
                        heappush(ready[r], priority[then])
                        touched.append(r)
        if len(order) < len(priority):
            raise ValueError(f"{len(priority) - len(order)} jobs wait for each other in a circle")
        return order, time

    def offered(self, job: int) -> bool:
        """Whether a job whose predecessors are done may start; the last of joined ones is the word for the others."""
        if job not in self.jobs.joined:
            return True
        together = self.jobs.joined[job]
        self.absent[together[0]] -= 1
        if self.absent[together[0]]:
            return False
        for other in together:
            if other != job:
                heappush(self.ready[self.jobs.rank[other]], self.priority[other])
        return True

    def start(self, r: int) -> int:
        """Start the most urgent job of rank `r` that has room, with those that are joined to it; -1 if there is none, or the rank has to
        wait for others."""
        jobs, ready = self.jobs, self.ready[r]
        while ready:
            job = self.by_priority[ready[0]]
            if job in self.begun:
                heappop(ready)
            elif (limit := self.takes[job]) >= 0 and not self.room[limit * jobs.ranks + r]:
                heappush(self.kept[limit * jobs.ranks + r], heappop(ready))
            elif job not in jobs.joined:
                heappop(ready)
                self.begin(job, r)
                return job
            elif all(self.free[jobs.rank[j]] for j in jobs.joined[job]):
                heappop(ready)
                for j in jobs.joined[job]:
                    self.begin(j, jobs.rank[j])
                self.begun.update(jobs.joined[job])
                return job
            else:
                self.held.add(r)
                return -1
        return -1

    def begin(self, job: int, r: int) -> None:
        """Take the job's room; its follower gets the line's next priority."""
        if (limit := self.takes[job]) >= 0:
            self.room[limit * self.jobs.ranks + r] -= 1
        if (then := self.followers[job]) >= 0:
            line = self.jobs.line_of[job]
            place = self.jobs.lines[line][self.started[line]]
            self.started[line] += 1
            self.priority[then], self.by_priority[place] = place, then

    def give(self, slot: int) -> None:
        """There is room again, for the most urgent job that was kept back."""
        self.room[slot] += 1
        kept = self.kept[slot]
        while kept and self.by_priority[kept[0]] in self.begun:
            heappop(kept)
        if kept:
            heappush(self.ready[slot % self.jobs.ranks], heappop(kept))

    def make_room(self) -> int:
        """Nothing runs: let the most urgent of the jobs that were kept back start. Its rank, or -1 if there is none."""
        slot = min((slot for slot, kept in self.kept.items() if kept), key=lambda slot: self.kept[slot][0], default=None)
        if slot is None:
            return -1
        self.give(slot)
        return slot % self.jobs.ranks
