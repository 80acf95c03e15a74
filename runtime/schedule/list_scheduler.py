"""List scheduling in virtual time: every rank, whenever it is free, starts the most urgent job whose
predecessors are done.

Jobs are numbers and their properties are lists, because a step has thousands of them and every rank runs this
before every step. Times are integer nanoseconds and no two jobs are equally urgent, so every run of it gives
the same order.

Two more rules serve pipelines. A line of jobs *follows* another one: the first of them to start makes its
follower the most urgent of the line, and so on, so that both go in one order. And jobs of a *limit* take room
on their rank that others give back when they end: one of so many places, and bytes where sizes are given, of
which one job alone may take more than there are. Without room they do not start, unless nothing else could:
room is a wish, so it can stop no step.

Jobs that are *joined* run at the same time, one on each of several ranks, for as long as the longest of them.
A rank that comes to one of them before the others are free waits; so it does for the other ranks that a
*wide* job keeps busy. Meanwhile these start nothing less urgent. Nothing can wait for ever: when no job runs,
all ranks are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush


@dataclass
class TaskGraph:
    """The jobs of a step. `priority` is a permutation of their numbers: the job with the least goes first.

    `duration` in ns; `successors` wait for a job, which itself waits for `waits` others. `joined` maps a job
    to all that run at the same time, itself included. `wide` has by jobs and their ranks the other ranks that
    are busy, too. Where there are lines or limits, `followers` has each job's follower and `line_of` the line
    that this is in, `takes` and `gives` have the limit whose room a job takes or gives back, all -1 without
    one, `sizes` how many bytes of it; `rooms` and `spaces` have the places and the bytes of a limit on a
    rank.
    """

    rank_count: int
    rank_of: list[int] = field(default_factory=list)
    duration_ns: list[int] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    predecessor_count: list[int] = field(default_factory=list)
    followers: list[int] = field(default_factory=list)
    line_of: list[int] = field(default_factory=list)
    line_priorities: list[list[int]] = field(
        default_factory=list
    )  # the priorities that the followers of a line have, most urgent first
    simultaneous: dict[int, tuple[int, ...]] = field(default_factory=dict)
    multi_rank: list[tuple[range, Mapping[int, tuple[int, ...]]]] = field(default_factory=list)
    acquires: list[int] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    count_limits: list[int] = field(default_factory=list)
    byte_limits: list[int] = field(default_factory=list)

    def add_dependency(self, first: int, then: int) -> None:
        """Make job `then` wait for job `first`."""
        self.successors[first].append(then)
        self.predecessor_count[then] += 1

    def add_arrival(self, time: int, some: Sequence[int]) -> int:
        """Make these jobs wait for a time: for a job of that length, which this returns, on a rank of its
        own."""
        job = len(self.rank_of)
        for column, value in (
            (self.rank_of, self.rank_count),
            (self.duration_ns, time),
            (self.priority, job),
            (self.predecessor_count, 0),
        ):
            column.append(value)
        self.successors.append([])
        if self.followers:
            for column in (self.followers, self.line_of, self.acquires, self.releases):
                column.append(-1)
            self.held_bytes.append(0)
        self.rank_count += 1
        for then in some:
            self.add_dependency(job, then)
        return job

    def follow_order(self, first: range, then: range) -> None:
        """Make the jobs `then` go in the order of the jobs `first`, each of which its follower waits for. All
        must have priorities."""
        self._allocate_limits()
        self.followers[first.start : first.stop] = then
        self.line_of[first.start : first.stop] = [len(self.line_priorities)] * len(first)
        self.line_priorities.append(sorted(self.priority[then.start : then.stop]))

    def join_tasks(self, together: Sequence[int]) -> None:
        """Make these jobs, each on another rank, run at the same time."""
        self.simultaneous |= dict.fromkeys(together, tuple(together))

    def occupy_ranks(self, some: range, ranks: Mapping[int, tuple[int, ...]]) -> None:
        """Make these jobs keep other ranks busy, too, which `ranks` has by the jobs' own."""
        self.multi_rank.append((some, ranks))

    def extra_ranks_by_task(self) -> dict[int, tuple[int, ...]]:
        """The wide jobs, and the ranks that they keep busy besides their own."""
        pairs = ((job, ranks.get(self.rank_of[job], ())) for some, ranks in self.multi_rank for job in some)
        return {job: others for job, others in pairs if others}

    def limit_in_flight(
        self, room: int, takes: range, gives: range, space: int = 0, sizes: Sequence[int] = ()
    ) -> None:
        """Give the jobs `takes` room for so many on a rank, each until a job of `gives` has ended there. All
        jobs must be there.

        With `sizes`, those on a rank may also not be larger together than `space`, unless one alone is.
        """
        self._allocate_limits()
        for column, some in ((self.acquires, takes), (self.releases, gives)):
            column[some.start : some.stop] = [len(self.count_limits)] * len(some)
            if sizes:
                self.held_bytes[some.start : some.stop] = sizes
        self.count_limits.append(room)
        self.byte_limits.append(space)

    def _allocate_limits(self) -> None:
        if not self.followers:
            self.followers, self.line_of, self.acquires, self.releases = (
                [-1] * len(self.rank_of) for _ in range(4)
            )
            self.held_bytes = [0] * len(self.rank_of)


def simulate_tasks(jobs: TaskGraph) -> tuple[list[int], int]:
    """The jobs in the order in which they start, over all ranks, and when the last one ends.

    Raises ValueError if jobs wait for each other in a circle.
    """
    found = _ListScheduler(jobs)
    found.run()
    return found.order, found.time


def simulate_with_last_rank(jobs: TaskGraph) -> tuple[list[int], int, int]:
    """The same jobs, when the last one ends, and on which rank, -1 without jobs."""
    found = _ListScheduler(jobs)
    found.run()
    return found.order, found.time, found.last_rank


def simulate_with_starts(jobs: TaskGraph) -> tuple[list[int], list[int]]:
    """The same jobs, and when each of them starts."""
    found = _ListScheduler(jobs)
    found.run()
    return found.order, found.starts


class _ListScheduler:
    """One run: which jobs may start on each rank, by urgency, and which are kept back for want of room. A
    *slot* is a limit on a rank."""

    def __init__(self, jobs: TaskGraph) -> None:
        self.graph, self.predecessors_left = jobs, jobs.predecessor_count.copy()
        self.priority, self.by_priority = jobs.priority.copy(), [0] * len(jobs.priority)
        for job, place in enumerate(jobs.priority):
            self.by_priority[place] = job
        self.is_free = [True] * jobs.rank_count
        self.extra_ranks = jobs.extra_ranks_by_task()
        self.simultaneous = {**{job: (job,) for job in self.extra_ranks}, **jobs.simultaneous}
        self.partners_missing = {
            job: len(some) for job, some in jobs.simultaneous.items() if job == some[0]
        }  # those that wait for others
        self.started_simultaneous, self.reserving_ranks = (
            set[int](),
            set[int](),
        )  # joined jobs that have started; ranks that wait for others to be free
        self.reserved_priority: dict[
            int, int
        ] = {}  # the ranks that they wait for, and how urgent what waits is
        self.yielding_ranks = set[int]()  # those of them that have less urgent jobs
        self.line_positions = [0] * len(jobs.line_priorities)
        none = [] if jobs.followers else [-1] * len(self.priority)
        self.acquires, self.releases, self.followers = (
            x or none for x in (jobs.acquires, jobs.releases, jobs.followers)
        )
        self.ready: list[list[int]] = [
            [] for _ in range(jobs.rank_count)
        ]  # priorities of the jobs that may start
        self.free_count = [room for room in jobs.count_limits for _ in range(jobs.rank_count)]  # by slot
        self.free_bytes = [space for space in jobs.byte_limits for _ in range(jobs.rank_count)]
        self.forced = set[int]()  # jobs that start whatever their size
        self.deferred: defaultdict[int, list[int]] = defaultdict(list)  # priorities by slot
        self.order, self.starts, self.time = list[int](), list[int](), 0
        self.last_rank = -1  # the rank of the job that ends last
        self.release_initial_tasks()

    def run(self) -> None:
        jobs, waits, ready, free, joined = (
            self.graph,
            self.predecessors_left,
            self.ready,
            self.is_free,
            self.simultaneous,
        )
        rank, duration, successors, ranks = jobs.rank_of, jobs.duration_ns, jobs.successors, jobs.rank_count
        by_priority, priority, takes, gives, followers = (
            self.by_priority,
            self.priority,
            self.acquires,
            self.releases,
            self.followers,
        )
        beside, reserved, bound, bits = (
            self.extra_ranks,
            self.reserved_priority,
            bool(jobs.followers),
            max(1, len(priority)).bit_length(),
        )
        mask, time, ends, order, starts = (1 << bits) - 1, 0, list[int](), self.order, self.starts
        # `ends`: (time << bits) + job, which orders by time
        touched = list(range(ranks))
        while True:
            for r in touched:
                queue = ready[r]
                while queue and free[r] and not (reserved and self.must_yield(r)):
                    job = by_priority[heappop(queue)]
                    if job in joined:
                        if self.start_simultaneous(job, r):
                            end = time + max(duration[j] for j in joined[job]) << bits
                            order += joined[job]
                            starts += [time] * len(joined[job])
                            for j in joined[job]:
                                heappush(ends, end + j)
                        if r in self.reserving_ranks:
                            break
                        continue
                    if bound and (limit := takes[job]) >= 0:
                        slot = limit * ranks + r
                        if not self.fits_in_flight(job, slot):
                            heappush(self.deferred[slot], priority[job])
                            continue
                        self.acquire_slot(job, slot)
                    if bound and followers[job] >= 0:
                        self.pass_priority_on(job)
                    free[r] = False
                    order.append(job)
                    starts.append(time)
                    heappush(ends, (time + duration[job] << bits) + job)
            if not ends:
                if (r := self.force_start()) < 0:
                    break
                touched = [r]
                continue
            time, self.last_rank = ends[0] >> bits, rank[ends[0] & mask]
            touched = self.release_reservations() if self.reserving_ranks else []
            while ends and ends[0] >> bits == time:
                job = heappop(ends) & mask
                r = rank[job]
                free[r] = True
                touched.append(r)
                if beside and job in beside:
                    touched += self.free_extra_ranks(job)
                if bound and gives[job] >= 0:
                    self.release_slot(job, gives[job] * ranks + r)
                for then in successors[job]:
                    waits[then] -= 1
                    if not waits[then] and (then not in joined or self.becomes_ready(then)):
                        r = rank[then]
                        heappush(ready[r], priority[then])
                        touched.append(r)
        if len(order) < len(priority):
            raise ValueError(f"{len(priority) - len(order)} jobs wait for each other in a circle")
        self.time = time

    def release_initial_tasks(self) -> None:
        """Make ready what waits for nothing."""
        for job in [job for job, count in enumerate(self.predecessors_left) if not count]:
            if self.becomes_ready(job):
                self.ready[self.graph.rank_of[job]].append(self.priority[job])
        for queue in self.ready:
            heapify(queue)

    def pass_priority_on(self, job: int) -> None:
        """A job's follower gets the line's next priority."""
        line, then = self.graph.line_of[job], self.followers[job]
        place = self.graph.line_priorities[line][self.line_positions[line]]
        self.line_positions[line] += 1
        self.priority[then], self.by_priority[place] = place, then

    # -- joined jobs
    # --------------------------------------------------------------------------------------------------------------

    def start_simultaneous(self, job: int, r: int) -> bool:
        """Start a job of rank `r` and those joined to it, unless they have started, lack room, or wait for
        ranks to be free."""
        jobs, together = self.graph, self.simultaneous[job]
        if job in self.started_simultaneous:
            return False
        if (limit := self.acquires[job]) >= 0 and not self.fits_in_flight(
            job, slot := limit * jobs.rank_count + r
        ):
            heappush(self.deferred[slot], self.priority[job])
            return False
        others = [on for j in together for on in self.extra_ranks.get(j, ())] if self.extra_ranks else []
        wanted = [*others, *(jobs.rank_of[j] for j in together)]
        if not all(map(self.is_free.__getitem__, wanted)):
            heappush(self.ready[r], self.priority[job])
            self.reserve_ranks(r, wanted, self.priority[job])
            return False
        for on in others:
            self.is_free[on] = False
        for j in together:
            on = jobs.rank_of[j]
            self.is_free[on] = False
            if (limit := self.acquires[j]) >= 0:
                self.acquire_slot(j, limit * jobs.rank_count + on)
            if self.followers[j] >= 0:
                self.pass_priority_on(j)
        self.started_simultaneous.update(together)
        return True

    def reserve_ranks(self, r: int, wanted: Sequence[int], place: int) -> None:
        """Rank `r` waits for these ranks to be free, which start nothing less urgent meanwhile: they might
        never all be free at once."""
        self.reserving_ranks.add(r)
        for on in wanted:
            self.reserved_priority[on] = min(place, self.reserved_priority.get(on, place))

    def must_yield(self, r: int) -> bool:
        """Whether a rank has nothing as urgent as what another one holds back for."""
        if r in self.reserving_ranks or self.ready[r][0] <= self.reserved_priority.get(r, self.ready[r][0]):
            return False
        self.yielding_ranks.add(r)
        return True

    def release_reservations(self) -> list[int]:
        """The ranks that waited for others, those first that others wait with, and those that held back for
        them; all may start again."""
        found = [*self.reserving_ranks, *self.yielding_ranks]
        for some in (self.reserving_ranks, self.yielding_ranks, self.reserved_priority):
            some.clear()
        return found

    def free_extra_ranks(self, job: int) -> tuple[int, ...]:
        """Make the ranks free that an ended job kept busy besides its own."""
        others = self.extra_ranks[job]
        for on in others:
            self.is_free[on] = True
        return others

    def becomes_ready(self, job: int) -> bool:
        """Whether a job whose predecessors are done may start; the last of joined ones is the word for the
        others."""
        if job not in self.graph.simultaneous:
            return True
        together = self.graph.simultaneous[job]
        self.partners_missing[together[0]] -= 1
        if self.partners_missing[together[0]]:
            return False
        for other in together:
            if other != job:
                heappush(self.ready[self.graph.rank_of[other]], self.priority[other])
        return True

    # -- room
    # ---------------------------------------------------------------------------------------------------------------------

    def fits_in_flight(self, job: int, slot: int) -> bool:
        """Whether there is a place for a job and, unless it would be alone, as many bytes as it takes.

        Where bytes are bounded none passes one that is more urgent, or the large ones would wait for the
        small ones' end.
        """
        size, space, whole = (
            self.graph.held_bytes[job],
            self.free_bytes[slot],
            self.graph.byte_limits[slot // self.graph.rank_count],
        )
        if self.free_count[slot] <= 0 or not whole or job in self.forced:
            return self.free_count[slot] > 0
        first = self.next_deferred(slot)
        return (size <= space or space == whole) and (first < 0 or self.priority[job] <= self.priority[first])

    def acquire_slot(self, job: int, slot: int) -> None:
        self.free_count[slot] -= 1
        self.free_bytes[slot] -= self.graph.held_bytes[job]

    def release_slot(self, job: int, slot: int) -> None:
        """There is room again, for the most urgent jobs that were kept back."""
        self.free_count[slot] += 1
        self.free_bytes[slot] += self.graph.held_bytes[job]
        space = self.free_bytes[slot]
        while (then := self.next_deferred(slot)) >= 0 and self.fits_in_flight(then, slot):
            heappush(self.ready[slot % self.graph.rank_count], heappop(self.deferred[slot]))
            space -= self.graph.held_bytes[then]
            if space <= 0 or not self.graph.held_bytes[job]:
                break

    def next_deferred(self, slot: int) -> int:
        """The most urgent of the jobs that were kept back, -1 if there is none."""
        kept = self.deferred.get(slot)
        while kept and self.by_priority[kept[0]] in self.started_simultaneous:
            heappop(kept)
        return self.by_priority[kept[0]] if kept else -1

    def force_start(self) -> int:
        """Nothing runs: let the most urgent of the jobs that were kept back start. Its rank, or -1 if there
        is none."""
        slot = min(
            (slot for slot, kept in self.deferred.items() if kept),
            key=lambda slot: self.deferred[slot][0],
            default=None,
        )
        if slot is None:
            return -1
        job = self.by_priority[heappop(self.deferred[slot])]
        self.forced.add(job)
        self.free_count[slot] = max(1, self.free_count[slot])
        heappush(self.ready[slot % self.graph.rank_count], self.priority[job])
        return slot % self.graph.rank_count
