"""List scheduling in simulated time (Graham 1966): a free rank starts the most urgent task with all
predecessors done.

Tasks are numbers and their properties are lists, because a step has thousands of tasks and every rank runs
this before every step. Times are integer nanoseconds and no two tasks are equally urgent, so every run gives
the same order.

Two more rules serve pipelines. A line of tasks *follows* another line: the first task of the leading line to
start makes its follower the most urgent one of the following line, and so on, so that both run in one order.
And an *in-flight limit* bounds how many tasks, and how many bytes, a rank holds between the start of an
acquiring task and the end of a releasing one (forward and backward of a micro-batch). A single task may
exceed the bytes. A task without a free place is deferred until nothing runs on the ranks that depend on each
other with its own: the limit is a wish that cannot stop a step. An *adding* task between the two (the first
part of a split backward) holds further bytes until the releasing one ends. Where it finds no room, a ready
releasing task starts in its place. So that it finds room in the end, a task acquires bytes only if each task
in flight could still add its own when all that started before it have been released.

*Simultaneous* tasks start together, one on each of several ranks, and take as long as the longest of them. A
rank that comes to one of them while another of these ranks is busy reserves them all; likewise for the
further ranks that a *multi-rank* task occupies. Reserved ranks start nothing less urgent meanwhile. Nothing
waits forever: when no task runs, all ranks are free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import NamedTuple


@dataclass
class TaskGraph:
    """The tasks of a step; a list has one entry per task unless stated otherwise.

    `rank_of`: the rank that runs the task; `duration_ns`; `priority`: a permutation of the task numbers,
    least first; `successors`: the tasks that wait for it; `predecessor_count`: how many tasks it waits for.

    `simultaneous` maps a task to all tasks that start together with it, itself included. `further_ranks` has
    {rank of the task: further ranks that it occupies}, None for a task that occupies none; it is empty if no
    task does.

    The following lists are empty without lines and limits, and -1 means none. `followers`: the task that
    follows; `line_of`: the line of the follower, an index into `line_priorities`, which has the sorted
    priorities of each following line. `acquires`, `releases`: the in-flight limit that gets a task when this
    one starts, or loses one when it ends; `held_bytes`: the bytes of it. `adds`: the limit from which an
    adding task takes further bytes when it starts; `added_bytes`: how many, also of the task that acquired
    before it. `count_limits`, `byte_limits`: by limit, for each rank.
    """

    rank_count: int
    rank_of: list[int] = field(default_factory=list)
    duration_ns: list[int] = field(default_factory=list)
    priority: list[int] = field(default_factory=list)
    successors: list[list[int]] = field(default_factory=list)
    predecessor_count: list[int] = field(default_factory=list)
    followers: list[int] = field(default_factory=list)
    line_of: list[int] = field(default_factory=list)
    line_priorities: list[list[int]] = field(default_factory=list)
    simultaneous: dict[int, tuple[int, ...]] = field(default_factory=dict)
    further_ranks: list[Mapping[int, tuple[int, ...]] | None] = field(default_factory=list)
    acquires: list[int] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    held_bytes: list[int] = field(default_factory=list)
    adds: list[int] = field(default_factory=list)
    added_bytes: list[int] = field(default_factory=list)
    count_limits: list[int] = field(default_factory=list)
    byte_limits: list[int] = field(default_factory=list)

    def add_dependency(self, first: int, then: int) -> None:
        """Makes task `then` wait for task `first`."""
        self.successors[first].append(then)
        self.predecessor_count[then] += 1

    def add_arrival(self, time: int, waiting: Sequence[int]) -> int:
        """Makes the tasks `waiting` wait until `time` (ns).

        Adds a task of that duration on a rank of its own, and returns its number.
        """
        arrival = len(self.rank_of)
        self.rank_of.append(self.rank_count)
        self.duration_ns.append(time)
        self.priority.append(arrival)
        self.predecessor_count.append(0)
        self.successors.append([])
        if self.further_ranks:
            self.further_ranks.append(None)
        if self.followers:
            for column in (self.followers, self.line_of, self.acquires, self.releases, self.adds):
                column.append(-1)
            self.held_bytes.append(0)
            self.added_bytes.append(0)
        self.rank_count += 1
        for task in waiting:
            self.add_dependency(arrival, task)
        return arrival

    def follow_order(self, first: range, then: range) -> None:
        """Makes the tasks `then` run in the order of the tasks `first`. Each task of `then` waits for its
        counterpart in `first`.

        All of them must have priorities already.
        """
        self._allocate_limits()
        self.followers[first.start : first.stop] = then
        self.line_of[first.start : first.stop] = [len(self.line_priorities)] * len(first)
        self.line_priorities.append(sorted(self.priority[then.start : then.stop]))

    def join_tasks(self, tasks: Sequence[int]) -> None:
        """Makes tasks on different ranks start together."""
        self.simultaneous |= dict.fromkeys(tasks, tuple(tasks))

    def occupy_ranks(self, tasks: range, ranks: Mapping[int, tuple[int, ...]]) -> None:
        """Makes tasks occupy further ranks: `ranks` has them by the task's own rank. All tasks must have been
        added already."""
        if not self.further_ranks:
            self.further_ranks = [None] * len(self.rank_of)
        self.further_ranks[tasks.start : tasks.stop] = [ranks] * len(tasks)

    def extra_ranks_of(self, task: int) -> tuple[int, ...]:
        """Returns the further ranks that a task occupies."""
        by_rank = self.further_ranks[task] if self.further_ranks else None
        return () if by_rank is None else by_rank.get(self.rank_of[task], ())

    def limit_in_flight(
        self,
        count: int,
        takes: range,
        gives: range,
        byte_limit: int = 0,
        sizes: Sequence[int] = (),
        adding: range = range(0),
        added: Sequence[int] = (),
    ) -> None:
        """Limits how many of the tasks `takes` are in flight on a rank, each until a task of `gives` ends
        there.

        With `sizes` (bytes, one per task), those in flight may not exceed `byte_limit` together either,
        unless one alone does. The tasks `adding`, one for each of `takes`, take `added` further bytes when
        they start. All tasks must have been added already.
        """
        self._allocate_limits()
        for column, tasks in ((self.acquires, takes), (self.releases, gives)):
            column[tasks.start : tasks.stop] = [len(self.count_limits)] * len(tasks)
            if sizes:
                self.held_bytes[tasks.start : tasks.stop] = sizes
        if added:
            self.adds[adding.start : adding.stop] = [len(self.count_limits)] * len(added)
            self.held_bytes[gives.start : gives.stop] = map(int.__add__, sizes, added)
            self.held_bytes[adding.start : adding.stop] = sizes
            for tasks in (takes, adding):
                self.added_bytes[tasks.start : tasks.stop] = added
        self.count_limits.append(count)
        self.byte_limits.append(byte_limit)

    def _allocate_limits(self) -> None:
        if not self.followers:
            tasks = len(self.rank_of)
            self.followers, self.line_of, self.acquires, self.releases = ([-1] * tasks for _ in range(4))
            self.adds = [-1] * tasks
            self.held_bytes, self.added_bytes = [0] * tasks, [0] * tasks


NO_LIMIT = 2**62  # ns


class SimulatedTasks(NamedTuple):
    """A simulated step: all tasks in the order in which they start, and when they do (ns), in the same order.

    `makespan` is the end of the last task and `last_rank` its rank, -1 without tasks.
    """

    order: list[int]
    starts: list[int]
    makespan: int
    last_rank: int


def simulate_tasks(graph: TaskGraph) -> SimulatedTasks:
    """Runs all tasks by list scheduling. Raises ValueError if tasks wait for each other in a circle."""
    simulated = _ListScheduler(graph).run(NO_LIMIT, [0] * graph.rank_count)
    assert simulated is not None
    return simulated


def simulate_within(graph: TaskGraph, latest_end: int, rank_work_ns: Sequence[int]) -> SimulatedTasks | None:
    """Runs all tasks by list scheduling, or returns None as soon as their end is sure to come after
    `latest_end` (ns): a rank still has more work than fits before it. rank_work_ns: what all tasks of each
    rank take."""
    return _ListScheduler(graph).run(latest_end, [*rank_work_ns])


class _ListScheduler:
    """The state of one simulation. A *slot* is a limit on a rank, numbered limit * rank_count + rank.

    Heaps hold priorities, which `by_priority` maps back to tasks: `ready` by rank, `deferred` by slot.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self.graph, self.predecessors_left = graph, graph.predecessor_count.copy()
        self.priority, self.by_priority = graph.priority.copy(), [0] * len(graph.priority)
        for task, priority in enumerate(graph.priority):
            self.by_priority[priority] = task
        self.is_free = [True] * graph.rank_count
        self.ready: list[list[int]] = [[] for _ in range(graph.rank_count)]

        self.partners_missing = {t: len(ts) for t, ts in graph.simultaneous.items() if t == ts[0]}
        self.started_simultaneous = set[int]()
        self.reserving_ranks = set[int]()  # ranks that wait for others to become free
        self.reserved_priority: dict[
            int, int
        ] = {}  # by reserved rank: the most urgent task that waits for it
        self.yielding_ranks = set[int]()  # reserved ranks that held back a less urgent task

        none = [] if graph.followers else [-1] * len(self.priority)
        self.followers, self.line_positions = graph.followers or none, [0] * len(graph.line_priorities)
        self.acquires, self.releases = graph.acquires or none, graph.releases or none
        self.free_count = [count for count in graph.count_limits for _ in range(graph.rank_count)]
        self.free_bytes = [size for size in graph.byte_limits for _ in range(graph.rank_count)]
        self.adds = graph.adds or none
        # By slot with adding tasks: (bytes held, bytes yet to be added) of what is in flight, in the order of
        # starts, and the releasing tasks that are ready.
        self.yet_to_add: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self.ready_to_release: defaultdict[int, list[int]] = defaultdict(list)
        self.started_early = set[int]()  # releasing tasks that started in the place of others
        self.limits_with_additions = {limit for limit in self.adds if limit >= 0}
        self.deferred: defaultdict[int, list[int]] = defaultdict(list)
        self.forced = set[int]()  # tasks that start whatever their size
        self.release_initial_tasks()

    def run(self, latest_end: int, work_left: list[int]) -> SimulatedTasks | None:
        # This loop runs once for each task of each simulation, so attributes are bound to locals first.
        graph, ready, is_free, simultaneous = self.graph, self.ready, self.is_free, self.graph.simultaneous
        rank_of, duration, rank_count = graph.rank_of, graph.duration_ns, graph.rank_count
        successors, predecessors_left = graph.successors, self.predecessors_left
        by_priority, priority, reserved = self.by_priority, self.priority, self.reserved_priority
        acquires, releases, followers = self.acquires, self.releases, self.followers
        with_additions, started_early = self.limits_with_additions, self.started_early
        further_ranks, has_limits = graph.further_ranks, bool(graph.followers)

        # The heap of running tasks holds (end << bits) + task, one integer that sorts by end time.
        bits = max(1, len(priority)).bit_length()
        mask, running = (1 << bits) - 1, list[int]()
        order, starts, time, last_rank = list[int](), list[int](), 0, -1
        ranks_to_visit = list(range(rank_count))  # ranks that became free or got a ready task
        while True:
            # 1. Start what can start now.
            for rank in ranks_to_visit:
                queue = ready[rank]
                while queue and is_free[rank] and not (reserved and self.must_yield(rank)):
                    task = by_priority[heappop(queue)]
                    if time + work_left[rank] > latest_end:
                        return None
                    if task in simultaneous:
                        if self.start_simultaneous(task, rank):
                            together = simultaneous[task]
                            for t in together:
                                work_left[rank_of[t]] -= duration[t]
                            end = time + max(duration[t] for t in together) << bits
                            order += together
                            starts += [time] * len(together)
                            for t in together:
                                heappush(running, end + t)
                        if rank in self.reserving_ranks:
                            break  # the task went back to the queue until all its ranks are free
                        continue
                    by_rank = further_ranks[task] if further_ranks else None
                    extra = () if by_rank is None else by_rank.get(rank, ())
                    slot, popped = -1, task
                    if with_additions:
                        if task in started_early:
                            continue
                        task = self.make_room_for(task, rank)
                    if has_limits and (limit := acquires[task]) >= 0:
                        slot = limit * rank_count + rank
                        if not self.fits_in_flight(task, slot):
                            heappush(self.deferred[slot], priority[task])
                            if extra and rank in self.reserving_ranks:
                                break  # another task waits for this rank and others
                            continue
                    if extra:
                        if not all(map(is_free.__getitem__, extra)):
                            heappush(queue, priority[popped])
                            self.reserve_ranks(rank, (*extra, rank), priority[popped])
                            break
                        for r in extra:
                            is_free[r] = False
                    if slot >= 0:
                        self.acquire_slot(task, slot)
                    if with_additions:
                        if task != popped:
                            heappush(queue, priority[popped])
                            started_early.add(task)
                        self.note_additions(task, rank)
                    if has_limits and followers[task] >= 0:
                        self.pass_priority_on(task)
                    is_free[rank] = False
                    work_left[rank] -= duration[task]
                    order.append(task)
                    starts.append(time)
                    heappush(running, (time + duration[task] << bits) + task)

            # 2. Where nothing runs, either all is done or every remaining task is deferred.
            if self.deferred and (forced := self.force_starts(ranks_to_visit)):
                ranks_to_visit = forced
                continue
            if not running:
                break

            # 3. Advance to the next end, and end all tasks that end then.
            time, last_rank = running[0] >> bits, rank_of[running[0] & mask]
            ranks_to_visit = self.release_reservations() if self.reserving_ranks else []
            while running and running[0] >> bits == time:
                task = heappop(running) & mask
                rank = rank_of[task]
                is_free[rank] = True
                ranks_to_visit.append(rank)
                if further_ranks and (by_rank := further_ranks[task]) is not None:
                    for r in by_rank.get(rank, ()):
                        is_free[r] = True
                        ranks_to_visit.append(r)
                if has_limits and releases[task] >= 0:
                    self.release_slot(task, releases[task] * rank_count + rank)
                for then in successors[task]:
                    predecessors_left[then] -= 1
                    if not predecessors_left[then] and (then not in simultaneous or self.becomes_ready(then)):
                        rank = rank_of[then]
                        heappush(ready[rank], priority[then])
                        ranks_to_visit.append(rank)
                        if with_additions and releases[then] in with_additions:
                            self.ready_to_release[releases[then] * rank_count + rank].append(then)
        if len(order) < len(priority):
            raise ValueError(f"{len(priority) - len(order)} tasks wait for each other in a circle")
        return SimulatedTasks(order, starts, time, last_rank)

    def release_initial_tasks(self) -> None:
        """Makes the tasks without predecessors ready."""
        for task in [task for task, count in enumerate(self.predecessors_left) if not count]:
            if self.becomes_ready(task):
                self.ready[self.graph.rank_of[task]].append(self.priority[task])
        for queue in self.ready:
            heapify(queue)

    def pass_priority_on(self, task: int) -> None:
        """Gives the follower of a starting task the next priority of its line.

        The line's priorities are handed out from the most urgent on, so followers get ready in the order in
        which the leading line starts. The follower cannot be ready before: it waits for this task.
        """
        line, follower = self.graph.line_of[task], self.followers[task]
        priority = self.graph.line_priorities[line][self.line_positions[line]]
        self.line_positions[line] += 1
        self.priority[follower], self.by_priority[priority] = priority, follower

    # -- tasks on several ranks

    def start_simultaneous(self, task: int, rank: int) -> bool:
        """Starts a task of `rank` and the tasks that start with it, and returns whether it did.

        It does not if they have started before, if the in-flight limit defers the task, or if one of the
        ranks is busy; then the ranks are reserved.
        """
        rank_of, together = self.graph.rank_of, self.graph.simultaneous[task]
        if task in self.started_simultaneous:
            return False
        if (limit := self.acquires[task]) >= 0 and not self.fits_in_flight(
            task, slot := limit * self.graph.rank_count + rank
        ):
            heappush(self.deferred[slot], self.priority[task])
            return False
        has_extra = bool(self.graph.further_ranks)
        extra = [r for t in together for r in self.graph.extra_ranks_of(t)] if has_extra else []
        needed = [*extra, *(rank_of[t] for t in together)]
        if not all(map(self.is_free.__getitem__, needed)):
            heappush(self.ready[rank], self.priority[task])
            self.reserve_ranks(rank, needed, self.priority[task])
            return False
        for r in extra:
            self.is_free[r] = False
        for t in together:
            self.is_free[rank_of[t]] = False
            if (limit := self.acquires[t]) >= 0:
                self.acquire_slot(t, limit * self.graph.rank_count + rank_of[t])
            if self.limits_with_additions:
                self.note_additions(t, rank_of[t])
            if self.followers[t] >= 0:
                self.pass_priority_on(t)
        self.started_simultaneous.update(together)
        return True

    def reserve_ranks(self, rank: int, needed: Sequence[int], priority: int) -> None:
        """Reserves the ranks that a task of `rank` needs; they start nothing less urgent until it starts.

        Without reservations they might never all be free at once.
        """
        self.reserving_ranks.add(rank)
        for r in needed:
            self.reserved_priority[r] = min(priority, self.reserved_priority.get(r, priority))

    def must_yield(self, rank: int) -> bool:
        """Returns whether all ready tasks of a rank are less urgent than the task that reserved it."""
        most_urgent = self.ready[rank][0]
        if rank in self.reserving_ranks or most_urgent <= self.reserved_priority.get(rank, most_urgent):
            return False
        self.yielding_ranks.add(rank)
        return True

    def release_reservations(self) -> list[int]:
        """Drops all reservations and returns the ranks that may now try again, reserving ones first.

        Reservations that are still needed are made again when these ranks are visited.
        """
        ranks = [*self.reserving_ranks, *self.yielding_ranks]
        for reservations in (self.reserving_ranks, self.yielding_ranks, self.reserved_priority):
            reservations.clear()
        return ranks

    def becomes_ready(self, task: int) -> bool:
        """Returns whether a task with all predecessors done may start.

        Simultaneous tasks become ready together, with the last of them: it makes the others ready here.
        """
        if task not in self.graph.simultaneous:
            return True
        together = self.graph.simultaneous[task]
        self.partners_missing[together[0]] -= 1
        if self.partners_missing[together[0]]:
            return False
        for other in together:
            if other != task:
                heappush(self.ready[self.graph.rank_of[other]], self.priority[other])
        return True

    # -- in-flight limits

    def fits_in_flight(self, task: int, slot: int) -> bool:
        """Returns whether a slot has a free place for a task, and enough bytes unless the task is alone in
        it.

        With a byte limit, no task overtakes a more urgent deferred one. Otherwise small tasks would keep
        taking the bytes that a large one waits for.
        """
        size, free_bytes = self.graph.held_bytes[task], self.free_bytes[slot]
        byte_limit = self.graph.byte_limits[slot // self.graph.rank_count]
        if self.free_count[slot] <= 0 or not byte_limit or task in self.forced:
            return self.free_count[slot] > 0
        first = self.next_deferred(slot)
        is_most_urgent = first < 0 or self.priority[task] <= self.priority[first]
        has_room = size <= free_bytes and (not self.limits_with_additions or self.leaves_room(task, slot))
        return (has_room or free_bytes == byte_limit) and is_most_urgent

    def leaves_room(self, task: int, slot: int) -> bool:
        """Returns whether all in flight can add what they will add if a task acquires its bytes."""
        limit = self.graph.byte_limits[slot // self.graph.rank_count]
        later = self.graph.held_bytes[task]
        if later + self.graph.added_bytes[task] > limit:
            return False
        for held, added in reversed(self.yet_to_add.get(slot, ())):
            later += held
            if later + added > limit:
                return False
        return True

    def make_room_for(self, task: int, rank: int) -> int:
        """Returns the releasing task that is to start in the place of an adding task without room, the most
        urgent one; else the task itself."""
        if (limit := self.adds[task]) < 0:
            return task
        slot = limit * self.graph.rank_count + rank
        releasing = self.ready_to_release.get(slot)
        if not releasing or self.graph.added_bytes[task] <= self.free_bytes[slot]:
            return task
        return min(releasing, key=self.priority.__getitem__)

    def note_additions(self, task: int, rank: int) -> None:
        """Notes that a task starts which takes bytes with additions, adds them, or releases them."""
        sizes = self.graph.held_bytes[task], self.graph.added_bytes[task]
        if (limit := self.acquires[task]) in self.limits_with_additions:
            self.yet_to_add[limit * self.graph.rank_count + rank].append(sizes)
        elif (limit := self.adds[task]) >= 0:
            slot = limit * self.graph.rank_count + rank
            self.free_bytes[slot] -= sizes[1]
            self.yet_to_add[slot].remove(sizes)
        elif (limit := self.releases[task]) in self.limits_with_additions:
            self.ready_to_release[limit * self.graph.rank_count + rank].remove(task)

    def acquire_slot(self, task: int, slot: int) -> None:
        self.free_count[slot] -= 1
        self.free_bytes[slot] -= self.graph.held_bytes[task]

    def release_slot(self, task: int, slot: int) -> None:
        """Gives back an ended task's place and bytes, and makes the deferred tasks ready that now fit.

        They take their places when they start, so the bytes left after them are counted here separately. A
        task without bytes frees a single place, which is enough for one deferred task.
        """
        self.free_count[slot] += 1
        self.free_bytes[slot] += self.graph.held_bytes[task]
        bytes_left = self.free_bytes[slot]
        while (then := self.next_deferred(slot)) >= 0 and self.fits_in_flight(then, slot):
            heappush(self.ready[slot % self.graph.rank_count], heappop(self.deferred[slot]))
            bytes_left -= self.graph.held_bytes[then]
            if bytes_left <= 0 or not self.graph.held_bytes[task]:
                break

    def next_deferred(self, slot: int) -> int:
        """Returns the most urgent deferred task of a slot, -1 if there is none."""
        deferred = self.deferred.get(slot)
        while deferred and self.by_priority[deferred[0]] in self.started_simultaneous:
            heappop(deferred)  # it started together with a task of another rank
        return self.by_priority[deferred[0]] if deferred else -1

    def force_starts(self, visited: Sequence[int]) -> list[int]:
        """Makes the most urgent deferred task of each group of ranks ready although it exceeds its limit, if
        nothing runs on them: nothing else can make room then. Only groups with a rank in `visited` count.

        Returns the ranks of these tasks.
        """
        forced = list[int]()
        group_of_rank, groups = self.rank_groups
        for group in map(groups.__getitem__, dict.fromkeys(map(group_of_rank.__getitem__, visited))):
            if all(map(self.is_free.__getitem__, group)):
                slots = [slot for slot in self.slots_of(group) if self.next_deferred(slot) >= 0]
                if slots:
                    forced.append(self.force_start(min(slots, key=lambda s: self.deferred[s][0])))
        return forced

    def slots_of(self, group: Sequence[int]) -> Iterable[int]:
        """Returns the slots of some ranks that have had deferred tasks."""
        if len(group) == self.graph.rank_count:
            return list(self.deferred)
        limits = range(0, len(self.free_count), self.graph.rank_count)
        return [slot for rank in group for limit in limits if (slot := limit + rank) in self.deferred]

    def force_start(self, slot: int) -> int:
        """Makes the most urgent deferred task of a slot ready; returns its rank."""
        task = self.by_priority[heappop(self.deferred[slot])]
        self.forced.add(task)
        self.free_count[slot] = max(1, self.free_count[slot])
        rank = slot % self.graph.rank_count
        heappush(self.ready[rank], self.priority[task])
        return rank

    @cached_property
    def rank_groups(self) -> tuple[list[int], dict[int, tuple[int, ...]]]:
        """(group of each rank, ranks of each group): ranks are in one group if tasks on them depend on each
        other, directly or through others."""
        graph, parent, left = self.graph, list(range(self.graph.rank_count)), self.graph.rank_count

        def find_root(rank: int) -> int:
            while parent[rank] != rank:
                parent[rank] = rank = parent[parent[rank]]
            return rank

        rank_of, pairs = graph.rank_of, set[tuple[int, int]]()
        for task, then in enumerate(graph.successors):
            pairs.update((rank_of[task], rank_of[t]) for t in then)
        for task, together in graph.simultaneous.items():
            pairs.update((rank_of[task], rank_of[t]) for t in together)
        for task in range(len(graph.further_ranks)):
            pairs.update((rank_of[task], r) for r in graph.extra_ranks_of(task))
        for a, b in sorted(pairs):
            if (first := find_root(a)) != (second := find_root(b)):
                parent[second], left = first, left - 1
                if left == 1:
                    break
        members = defaultdict[int, list[int]](list)
        for rank in range(graph.rank_count):
            members[find_root(rank)].append(rank)
        group_of_rank = [find_root(rank) for rank in range(graph.rank_count)]
        return group_of_rank, {first: tuple(ranks) for first, ranks in members.items()}
