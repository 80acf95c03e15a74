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
class Jobs:
    """The jobs of a step. `priority` is a permutation of their numbers: the job with the least goes first.

    `duration` in ns; `successors` wait for a job, which itself waits for `waits` others. `joined` maps a job
    to all that run at the same time, itself included. `wide` has by jobs and their ranks the other ranks that
    are busy, too. Where there are lines or limits, `followers` has each job's follower and `line_of` the line
    that this is in, `takes` and `gives` have the limit whose room a job takes or gives back, all -1 without
    one, `sizes` how many bytes of it; `rooms` and `spaces` have the places and the bytes of a limit on a
    rank.
    """

    ranks: int
    rank: list[int] = field(default_factory=list)
    duration: list[int] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    followers: list[int] = field(default_factory=list)
    line_of: list[int] = field(default_factory=list)
    lines: list[list[int]] = field(
        default_factory=list
    )  # the priorities that the followers of a line have, most urgent first
    joined: dict[int, tuple[int, ...]] = field(default_factory=dict)
    wide: list[tuple[range, Mapping[int, tuple[int, ...]]]] = field(default_factory=list)
    takes: list[int] = field(default_factory=list)
    gives: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    spaces: list[int] = field(default_factory=list)

    def before(self, first: int, then: int) -> None:
        """Make job `then` wait for job `first`."""
        self.successors[first].append(then)
        self.waits[then] += 1

    def arrive(self, time: int, some: Sequence[int]) -> int:
        """Make these jobs wait for a time: for a job of that length, which this returns, on a rank of its
        own."""
        job = len(self.rank)
        for column, value in (
            (self.rank, self.ranks),
            (self.duration, time),
            (self.priority, job),
            (self.waits, 0),
        ):
            column.append(value)
        self.successors.append([])
        if self.followers:
            for column in (self.followers, self.line_of, self.takes, self.gives):
                column.append(-1)
            self.sizes.append(0)
        self.ranks += 1
        for then in some:
            self.before(job, then)
        return job

    def follow(self, first: range, then: range) -> None:
        """Make the jobs `then` go in the order of the jobs `first`, each of which its follower waits for. All
        must have priorities."""
        self._bind()
        self.followers[first.start : first.stop] = then
        self.line_of[first.start : first.stop] = [len(self.lines)] * len(first)
        self.lines.append(sorted(self.priority[then.start : then.stop]))

    def join(self, together: Sequence[int]) -> None:
        """Make these jobs, each on another rank, run at the same time."""
        self.joined |= dict.fromkeys(together, tuple(together))

    def widen(self, some: range, ranks: Mapping[int, tuple[int, ...]]) -> None:
        """Make these jobs keep other ranks busy, too, which `ranks` has by the jobs' own."""
        self.wide.append((some, ranks))

    def beside(self) -> dict[int, tuple[int, ...]]:
        """The wide jobs, and the ranks that they keep busy besides their own."""
        pairs = ((job, ranks.get(self.rank[job], ())) for some, ranks in self.wide for job in some)
        return {job: others for job, others in pairs if others}

    def limit(self, room: int, takes: range, gives: range, space: int = 0, sizes: Sequence[int] = ()) -> None:
        """Give the jobs `takes` room for so many on a rank, each until a job of `gives` has ended there. All
        jobs must be there.

        With `sizes`, those on a rank may also not be larger together than `space`, unless one alone is.
        """
        self._bind()
        for column, some in ((self.takes, takes), (self.gives, gives)):
            column[some.start : some.stop] = [len(self.rooms)] * len(some)
            if sizes:
                self.sizes[some.start : some.stop] = sizes
        self.rooms.append(room)
        self.spaces.append(space)

    def _bind(self) -> None:
        if not self.followers:
            self.followers, self.line_of, self.takes, self.gives = ([-1] * len(self.rank) for _ in range(4))
            self.sizes = [0] * len(self.rank)


def run(jobs: Jobs) -> tuple[list[int], int]:
    """The jobs in the order in which they start, over all ranks, and when the last one ends.

    Raises ValueError if jobs wait for each other in a circle.
    """
    found = _Run(jobs)
    found.run()
    return found.order, found.time


def critical(jobs: Jobs) -> tuple[list[int], int, int]:
    """The same jobs, when the last one ends, and on which rank, -1 without jobs."""
    found = _Run(jobs)
    found.run()
    return found.order, found.time, found.last


def timed(jobs: Jobs) -> tuple[list[int], list[int]]:
    """The same jobs, and when each of them starts."""
    found = _Run(jobs)
    found.run()
    return found.order, found.starts


class _Run:
    """One run: which jobs may start on each rank, by urgency, and which are kept back for want of room. A
    *slot* is a limit on a rank."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs, self.waits = jobs, jobs.waits.copy()
        self.priority, self.by_priority = jobs.priority.copy(), [0] * len(jobs.priority)
        for job, place in enumerate(jobs.priority):
            self.by_priority[place] = job
        self.free = [True] * jobs.ranks
        self.beside = jobs.beside()
        self.joined = {**{job: (job,) for job in self.beside}, **jobs.joined}
        self.absent = {
            job: len(some) for job, some in jobs.joined.items() if job == some[0]
        }  # those that wait for others
        self.begun, self.held = (
            set[int](),
            set[int](),
        )  # joined jobs that have started; ranks that wait for others to be free
        self.reserved: dict[int, int] = {}  # the ranks that they wait for, and how urgent what waits is
        self.yielding = set[int]()  # those of them that have less urgent jobs
        self.started = [0] * len(jobs.lines)
        none = [] if jobs.followers else [-1] * len(self.priority)
        self.takes, self.gives, self.followers = (x or none for x in (jobs.takes, jobs.gives, jobs.followers))
        self.ready: list[list[int]] = [[] for _ in range(jobs.ranks)]  # priorities of the jobs that may start
        self.room = [room for room in jobs.rooms for _ in range(jobs.ranks)]  # by slot
        self.space = [space for space in jobs.spaces for _ in range(jobs.ranks)]
        self.forced = set[int]()  # jobs that start whatever their size
        self.kept: defaultdict[int, list[int]] = defaultdict(list)  # priorities by slot
        self.order, self.starts, self.time = list[int](), list[int](), 0
        self.last = -1  # the rank of the job that ends last
        self.offer_first()

    def run(self) -> None:
        jobs, waits, ready, free, joined = self.jobs, self.waits, self.ready, self.free, self.joined
        rank, duration, successors, ranks = jobs.rank, jobs.duration, jobs.successors, jobs.ranks
        by_priority, priority, takes, gives, followers = (
            self.by_priority,
            self.priority,
            self.takes,
            self.gives,
            self.followers,
        )
        beside, reserved, bound, bits = (
            self.beside,
            self.reserved,
            bool(jobs.followers),
            max(1, len(priority)).bit_length(),
        )
        mask, time, ends, order, starts = (1 << bits) - 1, 0, list[int](), self.order, self.starts
        # `ends`: (time << bits) + job, which orders by time
        touched = list(range(ranks))
        while True:
            for r in touched:
                queue = ready[r]
                while queue and free[r] and not (reserved and self.yields(r)):
                    job = by_priority[heappop(queue)]
                    if job in joined:
                        if self.joins(job, r):
                            end = time + max(duration[j] for j in joined[job]) << bits
                            order += joined[job]
                            starts += [time] * len(joined[job])
                            for j in joined[job]:
                                heappush(ends, end + j)
                        if r in self.held:
                            break
                        continue
                    if bound and (limit := takes[job]) >= 0:
                        slot = limit * ranks + r
                        if not self.fits(job, slot):
                            heappush(self.kept[slot], priority[job])
                            continue
                        self.take(job, slot)
                    if bound and followers[job] >= 0:
                        self.pass_on(job)
                    free[r] = False
                    order.append(job)
                    starts.append(time)
                    heappush(ends, (time + duration[job] << bits) + job)
            if not ends:
                if (r := self.make_room()) < 0:
                    break
                touched = [r]
                continue
            time, self.last = ends[0] >> bits, rank[ends[0] & mask]
            touched = self.retried() if self.held else []
            while ends and ends[0] >> bits == time:
                job = heappop(ends) & mask
                r = rank[job]
                free[r] = True
                touched.append(r)
                if beside and job in beside:
                    touched += self.leave(job)
                if bound and gives[job] >= 0:
                    self.give(job, gives[job] * ranks + r)
                for then in successors[job]:
                    waits[then] -= 1
                    if not waits[then] and (then not in joined or self.offered(then)):
                        r = rank[then]
                        heappush(ready[r], priority[then])
                        touched.append(r)
        if len(order) < len(priority):
            raise ValueError(f"{len(priority) - len(order)} jobs wait for each other in a circle")
        self.time = time

    def offer_first(self) -> None:
        """Make ready what waits for nothing."""
        for job in [job for job, count in enumerate(self.waits) if not count]:
            if self.offered(job):
                self.ready[self.jobs.rank[job]].append(self.priority[job])
        for queue in self.ready:
            heapify(queue)

    def pass_on(self, job: int) -> None:
        """A job's follower gets the line's next priority."""
        line, then = self.jobs.line_of[job], self.followers[job]
        place = self.jobs.lines[line][self.started[line]]
        self.started[line] += 1
        self.priority[then], self.by_priority[place] = place, then

    # -- joined jobs
    # --------------------------------------------------------------------------------------------------------------

    def joins(self, job: int, r: int) -> bool:
        """Start a job of rank `r` and those joined to it, unless they have started, lack room, or wait for
        ranks to be free."""
        jobs, together = self.jobs, self.joined[job]
        if job in self.begun:
            return False
        if (limit := self.takes[job]) >= 0 and not self.fits(job, slot := limit * jobs.ranks + r):
            heappush(self.kept[slot], self.priority[job])
            return False
        others = [on for j in together for on in self.beside.get(j, ())] if self.beside else []
        wanted = [*others, *(jobs.rank[j] for j in together)]
        if not all(map(self.free.__getitem__, wanted)):
            heappush(self.ready[r], self.priority[job])
            self.hold(r, wanted, self.priority[job])
            return False
        for on in others:
            self.free[on] = False
        for j in together:
            on = jobs.rank[j]
            self.free[on] = False
            if (limit := self.takes[j]) >= 0:
                self.take(j, limit * jobs.ranks + on)
            if self.followers[j] >= 0:
                self.pass_on(j)
        self.begun.update(together)
        return True

    def hold(self, r: int, wanted: Sequence[int], place: int) -> None:
        """Rank `r` waits for these ranks to be free, which start nothing less urgent meanwhile: they might
        never all be free at once."""
        self.held.add(r)
        for on in wanted:
            self.reserved[on] = min(place, self.reserved.get(on, place))

    def yields(self, r: int) -> bool:
        """Whether a rank has nothing as urgent as what another one holds back for."""
        if r in self.held or self.ready[r][0] <= self.reserved.get(r, self.ready[r][0]):
            return False
        self.yielding.add(r)
        return True

    def retried(self) -> list[int]:
        """The ranks that waited for others, those first that others wait with, and those that held back for
        them; all may start again."""
        found = [*self.held, *self.yielding]
        for some in (self.held, self.yielding, self.reserved):
            some.clear()
        return found

    def leave(self, job: int) -> tuple[int, ...]:
        """Make the ranks free that an ended job kept busy besides its own."""
        others = self.beside[job]
        for on in others:
            self.free[on] = True
        return others

    def offered(self, job: int) -> bool:
        """Whether a job whose predecessors are done may start; the last of joined ones is the word for the
        others."""
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

    # -- room
    # ---------------------------------------------------------------------------------------------------------------------

    def fits(self, job: int, slot: int) -> bool:
        """Whether there is a place for a job and, unless it would be alone, as many bytes as it takes.

        Where bytes are bounded none passes one that is more urgent, or the large ones would wait for the
        small ones' end.
        """
        size, space, whole = self.jobs.sizes[job], self.space[slot], self.jobs.spaces[slot // self.jobs.ranks]
        if self.room[slot] <= 0 or not whole or job in self.forced:
            return self.room[slot] > 0
        first = self.next_kept(slot)
        return (size <= space or space == whole) and (first < 0 or self.priority[job] <= self.priority[first])

    def take(self, job: int, slot: int) -> None:
        self.room[slot] -= 1
        self.space[slot] -= self.jobs.sizes[job]

    def give(self, job: int, slot: int) -> None:
        """There is room again, for the most urgent jobs that were kept back."""
        self.room[slot] += 1
        self.space[slot] += self.jobs.sizes[job]
        space = self.space[slot]
        while (then := self.next_kept(slot)) >= 0 and self.fits(then, slot):
            heappush(self.ready[slot % self.jobs.ranks], heappop(self.kept[slot]))
            space -= self.jobs.sizes[then]
            if space <= 0 or not self.jobs.sizes[job]:
                break

    def next_kept(self, slot: int) -> int:
        """The most urgent of the jobs that were kept back, -1 if there is none."""
        kept = self.kept.get(slot)
        while kept and self.by_priority[kept[0]] in self.begun:
            heappop(kept)
        return self.by_priority[kept[0]] if kept else -1

    def make_room(self) -> int:
        """Nothing runs: let the most urgent of the jobs that were kept back start. Its rank, or -1 if there
        is none."""
        slot = min(
            (slot for slot, kept in self.kept.items() if kept),
            key=lambda slot: self.kept[slot][0],
            default=None,
        )
        if slot is None:
            return -1
        job = self.by_priority[heappop(self.kept[slot])]
        self.forced.add(job)
        self.room[slot] = max(1, self.room[slot])
        heappush(self.ready[slot % self.jobs.ranks], self.priority[job])
        return slot % self.jobs.ranks
