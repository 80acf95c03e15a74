"""Simulates one replica of a pipeline alone: how its stages process the micro-batches of an order.

The stages take micro-batches in that order. A free stage runs a backward if one is ready, else the next
forward if its input is ready and the in-flight limits allow it, else the oldest pending W part of a backward
(1F1B and, with W parts, zero-bubble scheduling). A backward without room for what it keeps until its W part
waits for pending W parts, which run at once. `list_scheduler` does the same with the same order; without
the other ranks it takes a third of the time, so two orders of one replica are compared within a millisecond.

A rank with several stages (chunks of layers) alternates: after a backward, a ready forward comes before the
next backward (without that, interleaved 1F1B would take up to 30% longer). It takes from its last stage
first, but whole backwards in a V from its first stage. Only in a loop, forwards go through the stages in
rounds of as many micro-batches as there are ranks (interleaved 1F1B, Narayanan et al. 2021), because what a
stage sends returns to the rank after that number.

Searches compare an order with one that differs in a place or two, and keep it only if it ends soon enough.
`simulate_within` takes over what both orders have in common and gives up when the end is sure to be too late.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate
from operator import itemgetter, ne
from typing import NamedTuple

NEVER_NS = 1 << 62

StageTimes = list[list[int]]  # [stage][position in the order], ns


class ReplicaTimeline(NamedTuple):
    """The simulated times of a replica, in ns, by position in its order.

    `end`: end of the last task. `starts`, `backward_ends`: of the forwards and backwards on the first stage.
    `task_ends`: of all forwards, backwards and W parts (empty without split backwards).
    """

    end: int
    starts: list[int]
    backward_ends: list[int]
    task_ends: tuple[StageTimes, StageTimes, StageTimes]


@dataclass(frozen=True)
class PipelineReplica:
    """The stages of one pipeline replica.

    `forward_ns[s][m]`, `backward_ns[s][m]`, `weight_ns[s][m]`: ns of micro-batch m on stage s; `backward_ns`
    is without the W part, and `weight_ns` is empty unless backwards are split. `max_in_flight[s]`:
    micro-batches that stage s may hold between the forward and the last part of the backward (0: any number).
    `saved_bytes[s][m]`: bytes that they hold meanwhile, `byte_limits[s]` the limit; both empty if unbounded.
    `between_bytes[s][m]`: bytes that they hold in addition from the start of the backward on, [] for none.
    `rank_of_stage[s]`: the number of the stage's rank, from 0; empty if each stage has its own.
    """

    forward_ns: Sequence[Sequence[int]]
    backward_ns: Sequence[Sequence[int]]
    weight_ns: Sequence[Sequence[int]]
    max_in_flight: Sequence[int]
    saved_bytes: Sequence[Sequence[int]] = ()
    byte_limits: Sequence[int] = ()
    rank_of_stage: Sequence[int] = ()
    between_bytes: Sequence[Sequence[int]] = ()

    @property
    def rank_count(self) -> int:
        """Number of ranks that the stages have."""
        return max(self.rank_of_stage) + 1 if self.rank_of_stage else len(self.forward_ns)

    def simulate(self, order: Sequence[int], ready: Sequence[int]) -> ReplicaTimeline:
        """Simulates an order of micro-batches, with the first stage's inputs ready at `ready[m]` ns."""
        simulation = _SharedRankSimulation if self.rank_of_stage else _ReplicaSimulation
        return simulation(self, order, ready).run()

    def simulate_within(
        self,
        order: Sequence[int],
        ready: Sequence[int],
        latest_end: int,
        known_order: Sequence[int] = (),
        known: ReplicaTimeline | None = None,
    ) -> ReplicaTimeline | None:
        """Returns `simulate(order, ready)`, or None as soon as its end is sure to come after `latest_end`
        (ns). `known` is the timeline of `known_order` with the same `ready`: both orders take the same time
        up to the first place where they differ."""
        if self.rank_of_stage:
            return self.simulate(order, ready)
        simulation = _ReplicaSimulation(self, order, ready)
        if known is not None and self._takes_time:
            shorter = min(len(order), len(known_order))
            changes = map(ne, order, known_order)
            simulation.take_over(known, next((i for i, changed in enumerate(changes) if changed), shorter))
        return simulation.run_within(latest_end)

    @cached_property
    def _takes_time(self) -> bool:
        """Whether every task takes some time. Of tasks that take none, what starts first at one moment would
        depend on where a simulation begins."""
        parts = (*self.forward_ns, *self.backward_ns, *self.weight_ns)
        return all(min(ns, default=1) > 0 for ns in parts)


class _ForwardLimit:
    """How many forwards a stage may have started, by the number of micro-batches that it has finished.

    Always at least one more than are finished, so a micro-batch larger than the byte limit does not block the
    stage. It never falls, so it is found by going on from where it was. What backwards add (`between`) must
    find room, too: each with what started after it, once all before it are finished. Then the limit is the
    number of micro-batches in flight alone, and `forward_fits` tells whether there is room.
    """

    def __init__(self, replica: PipelineReplica, stage: int, order: Sequence[int]) -> None:
        self._count = len(order)
        self._most_in_flight = replica.max_in_flight[stage] or self._count
        self._bytes_before: list[int] = []  # of the first micro-batches of the order, by their number
        if replica.saved_bytes and replica.saved_bytes[stage]:
            self._bytes_before = [0, *accumulate(map(replica.saved_bytes[stage].__getitem__, order))]
            self._byte_limit = replica.byte_limits[stage]
        # What backwards add, in the order, and its sums before the first ones.
        self.between: list[int] = []
        if self._bytes_before and replica.between_bytes and replica.between_bytes[stage]:
            self.between = list(map(replica.between_bytes[stage].__getitem__, order))
            self._between_before = [0, *accumulate(self.between)]
            # What a backward adds, less the bytes before its micro-batch; mostly the first one of some is the
            # largest.
            self._between_after = list(map(int.__sub__, self.between, self._bytes_before))
            self._falls = self._between_after == sorted(self._between_after, reverse=True)
        self._limit = 0

    def backward_fits(self, forwards: int, backwards: int, finished: int) -> bool:
        """Returns whether the next backward has room for what it adds."""
        held = self._bytes_before[forwards] - self._bytes_before[finished]
        return held + self._between_before[backwards + 1] - self._between_before[finished] <= self._byte_limit

    def forward_fits(self, forwards: int, backwards: int, finished: int) -> bool:
        """Returns whether the next forward, which is within the limit, has room for its bytes and leaves
        enough for what all in flight will add."""
        if forwards == finished:
            return True
        until, added = self._bytes_before[forwards + 1], self._between_before
        if until - self._bytes_before[finished] + added[backwards] - added[finished] > self._byte_limit:
            return False
        after = self._between_after
        largest = after[backwards] if self._falls else max(after[backwards : forwards + 1])
        return until + largest <= self._byte_limit

    def limit_after(self, finished: int) -> int:
        """Returns the limit once `finished` micro-batches have been finished, no fewer than before."""
        most = self._most_in_flight + finished
        if most > self._count:
            most = self._count
        if not self._bytes_before or self.between or finished == self._count:
            return most
        limit, before = max(self._limit, finished + 1), self._bytes_before
        allowed = before[finished] + self._byte_limit
        while limit < most and before[limit + 1] <= allowed:
            limit += 1
        self._limit = limit
        return limit


class _StageTimes:
    """The times of one simulation in ns, by position in the order, NEVER_NS where unknown.

    `forward_ready[s]` and `backward_ready[s + 1]` are when forwards and backwards may start on stage s. They
    are also the ends on the neighbouring stage: `forward_ready[s + 1]` and `backward_ready[s]` are when stage
    s ends them. `weight_ends[s]` are the ends of W parts.
    """

    def __init__(self, replica: PipelineReplica, order: Sequence[int], ready: Sequence[int]) -> None:
        count, stages = len(order), len(replica.forward_ns)
        parts = (replica.forward_ns, replica.backward_ns, replica.weight_ns)
        in_order = itemgetter(*order) if count > 1 else lambda ns: tuple(map(ns.__getitem__, order))
        self.durations: list[list[tuple[int, ...]]] = [list(map(in_order, part)) for part in parts]
        self.forward_limits = [_ForwardLimit(replica, s, order) for s in range(stages)]
        unknown = [NEVER_NS] * (count + 1)  # the last entry stands for "no further micro-batch"
        self.forward_ready = [
            [*map(ready.__getitem__, order), NEVER_NS],
            *(unknown.copy() for _ in range(stages)),
        ]
        self.backward_ready = [[0] * count, *(unknown.copy() for _ in range(stages))]
        # The last stage's backwards wait for its own forwards alone.
        self.backward_ready[-1] = self.forward_ready[-1]
        self.weight_ends = [[0] * count for _ in replica.weight_ns]

    def timeline(self) -> ReplicaTimeline:
        """Returns the timeline, once all times are known."""
        forwards = [ends[:-1] for ends in self.forward_ready[1:]]
        backwards = [self.backward_ready[0], *(ends[:-1] for ends in self.backward_ready[1:-1])]
        end = max((max(ends) for ends in self.weight_ends or backwards if ends), default=0)
        starts = list(map(int.__sub__, forwards[0], self.durations[0][0]))
        return ReplicaTimeline(end, starts, self.backward_ready[0], (forwards, backwards, self.weight_ends))


class _SharedRankSimulation(_StageTimes):
    """A simulation in which ranks have several stages. Ranks look for a task whenever they end one or may
    have got an input."""

    def __init__(self, replica: PipelineReplica, order: Sequence[int], ready: Sequence[int]) -> None:
        super().__init__(replica, order, ready)
        self.rank_of, self.count = replica.rank_of_stage, len(order)
        self.is_loop = self.rank_of[replica.rank_count] == self.rank_of[0]
        # The stages of each rank, the last one first.
        self.stages_of: list[list[int]] = [[] for _ in range(replica.rank_count)]
        for s in reversed(range(len(self.rank_of))):
            self.stages_of[self.rank_of[s]].append(s)
        self.backward_stages_of = [self.order_backward_stages(stages) for stages in self.stages_of]
        self.done = [[0] * len(self.rank_of) for _ in range(3)]  # forwards, backwards and W parts, by stage
        self.free_at = [0] * replica.rank_count
        self.after_backward = [False] * replica.rank_count
        self.round_size = replica.rank_count if self.is_loop else 0
        # (time, rank): when ranks look for a task
        self.wake_ups = [(0, rank) for rank in range(replica.rank_count)]
        first = self.rank_of[0]
        self.wake_ups += [(time, first) for time in sorted(set(self.forward_ready[0][:-1]))]
        heapify(self.wake_ups)

    def order_backward_stages(self, stages: Sequence[int]) -> Sequence[int]:
        """Returns a rank's stages in the order in which they take backwards; `stages` has the last one first.

        In a V with whole backwards that is the first stage, because its backwards end micro-batches and so
        let the next ones start. The last stage of all takes its backward right after its forward, as one
        task.
        """
        if self.is_loop or self.weight_ends:
            return stages
        return sorted(stages, key=lambda s: (s != len(self.rank_of) - 1, s))

    def run(self) -> ReplicaTimeline:
        """Runs all tasks."""
        wake_ups, free_at = self.wake_ups, self.free_at
        while wake_ups:
            time, rank = heappop(wake_ups)
            if free_at[rank] <= time:
                self.start_task(rank, time)
        return self.timeline()

    def start_task(self, rank: int, time: int) -> None:
        """Starts the most urgent task of a free rank, if there is one."""
        stages, (_, backwards, weights) = self.stages_of[rank], self.done
        backward = forward = -1
        for s in self.backward_stages_of[rank]:
            if backwards[s] < self.count and self.backward_ready[s + 1][backwards[s]] <= time:
                backward = s
                break
        if backward < len(self.rank_of) - 1:
            forward = self.next_forward_stage(stages, time)
        if backward >= 0 and not self.backward_fits(backward):
            self.end_task(rank, 2, backward, time, self.weight_ends[backward], -1)
        elif backward >= 0 and (forward < 0 or not self.after_backward[rank]):
            self.end_task(rank, 1, backward, time, self.backward_ready[backward], backward - 1)
        elif forward >= 0:
            self.end_task(rank, 0, forward, time, self.forward_ready[forward + 1], forward + 1)
        elif waiting := [s for s in stages if self.weight_ends and weights[s] < backwards[s]]:
            s = min(waiting, key=weights.__getitem__)
            self.end_task(rank, 2, s, time, self.weight_ends[s], -1)

    def backward_fits(self, s: int) -> bool:
        """Returns whether stage `s` has room for its next backward, or no pending W part to make some."""
        (forwards, backwards, weights), limit = self.done, self.forward_limits[s]
        if not limit.between or weights[s] == backwards[s]:
            return True
        return limit.backward_fits(forwards[s], backwards[s], weights[s])

    def next_forward_stage(self, stages: Sequence[int], time: int) -> int:
        """Returns which of a rank's stages takes the next forward, -1 if none may."""
        forwards, finished = self.done[0], self.done[2 if self.weight_ends else 1]
        best, least_round = -1, NEVER_NS
        for s in stages:
            k, limit = forwards[s], self.forward_limits[s]
            if (
                self.forward_ready[s][k] <= time
                and k < limit.limit_after(finished[s])
                and (not limit.between or limit.forward_fits(k, self.done[1][s], finished[s]))
            ):
                if not self.round_size:
                    return s
                if k // self.round_size <= least_round:
                    best, least_round = s, k // self.round_size
        return best

    def end_task(self, rank: int, part: int, s: int, time: int, ends: list[int], receiver: int) -> None:
        """Notes the end of the next forward (part 0), backward (1) or W part (2) of stage `s`, which starts
        now, and wakes its rank and the stage `receiver` then."""
        k = self.done[part][s]
        end = ends[k] = time + self.durations[part][s][k]
        self.done[part][s] = k + 1
        self.after_backward[rank] = part == 1 if part < 2 else self.after_backward[rank]
        self.free_at[rank] = end
        heappush(self.wake_ups, (end, rank))
        if 0 <= receiver < len(self.rank_of) and self.rank_of[receiver] != rank:
            heappush(self.wake_ups, (end, self.rank_of[receiver]))


class _EndsTooLate(Exception):
    """Ends a simulation that cannot end in time."""


class _ReplicaSimulation(_StageTimes):
    """The state of one simulation with one stage on each rank.

    `next_action[s]` is when stage s looks for its next task. `idle_until[s]` is the same for an idle stage,
    which a neighbour may wake earlier, and 0 for a busy one. Both have a further entry for the missing
    neighbours before the first stage (index -1) and after the last one, which never acts and cannot be woken.
    `done[s]` counts the forwards, backwards and W parts that stage s has started when the simulation begins.
    """

    def __init__(self, replica: PipelineReplica, order: Sequence[int], ready: Sequence[int]) -> None:
        super().__init__(replica, order, ready)
        stages = len(replica.forward_ns)
        self.next_action, self.idle_until = [*[0] * stages, NEVER_NS], [0] * (stages + 1)
        self.done = [(0, 0, 0)] * stages

    def take_over(self, known: ReplicaTimeline, place: int) -> None:
        """Takes over the tasks of another order with equal micro-batches before `place` that start before the
        first stage may choose the forward there; until then, nothing depends on what follows."""
        if not place:
            return
        begin = known.task_ends[0][0][place - 1]
        ends_of_part = (self.forward_ready[1:], self.backward_ready, self.weight_ends)
        for s in range(len(self.done)):
            done, busy_until = [0, 0, 0], begin
            for part, (known_ends, ends) in enumerate(zip(known.task_ends, ends_of_part, strict=True)):
                if not known_ends:
                    continue
                of_stage = known_ends[s]
                n = bisect_left(of_stage, begin, hi=place)
                if n < place and of_stage[n] - self.durations[part][s][n] < begin:
                    n += 1
                    busy_until = max(busy_until, of_stage[n - 1])
                ends[s][:n], done[part] = of_stage[:n], n
            self.done[s], self.next_action[s] = (done[0], done[1], done[2]), busy_until

    def run(self) -> ReplicaTimeline:
        """Runs all tasks."""
        timeline = self.run_within(NEVER_NS)
        assert timeline is not None
        return timeline

    def run_within(self, latest_end: int) -> ReplicaTimeline | None:
        """Runs all tasks, or returns None as soon as their end is sure to come after `latest_end`: a stage
        has been idle for too long for what it has to do, and for the last backward on the stages before."""
        next_action, stages = self.next_action, range(len(self.forward_limits))
        spare = self.spare_times(latest_end) if latest_end < NEVER_NS else [NEVER_NS] * len(stages)
        if min(spare) < 0:
            return None
        running = [self.run_stage(s, spare[s]) for s in stages]
        for stage in running:
            next(stage)
        act = [stage.send for stage in running]
        try:
            while (time := min(next_action)) < NEVER_NS:
                act[next_action.index(time)](time)
        except _EndsTooLate:
            return None
        return self.timeline()

    def spare_times(self, latest_end: int) -> list[int]:
        """Returns how long each stage may still be idle if the replica ends at `latest_end`, in ns."""
        forward, backward, weight = self.durations
        spare, behind = list[int](), 0
        for s, (forwards, backwards, weights) in enumerate(self.done):
            left = sum(forward[s][forwards:]) + sum(backward[s][backwards:])
            if weight:
                left += sum(weight[s][weights:])
            spare.append(latest_end - self.next_action[s] - left - behind)
            if not weight and backward[s]:  # the last backward passes the stages before one after the other
                behind += backward[s][-1]
        return spare

    def run_stage(self, s: int, spare: int) -> Generator[None, int, None]:
        """Runs stage `s`, which may be idle for `spare` ns: a coroutine that gets the current time whenever
        the stage is to act.

        After a task the stage starts the next one at once, ahead of the clock, if nothing that its neighbours
        have yet to do can change the choice; that saves most of the switches between stages.
        """
        forward, backward, *split = (part[s] for part in self.durations if part)
        weight = split[0] if split else []
        weight_ends = self.weight_ends[s] if weight else []
        forward_limit = self.forward_limits[s]
        limit_after, between = forward_limit.limit_after, forward_limit.between
        forward_fits = forward_limit.forward_fits
        next_action, idle_until = self.next_action, self.idle_until
        forward_ready, forward_ends = self.forward_ready[s], self.forward_ready[s + 1]
        backward_ready, backward_ends = self.backward_ready[s + 1], self.backward_ready[s]
        before, after = s - 1, s + 1
        # Durations on the neighbours. Missing neighbours never act, so what stands for theirs does not
        # matter.
        forward_before = self.durations[0][before]
        backward_after = [*self.durations[1][after % len(self.forward_limits)], NEVER_NS]
        next_forward, next_backward, next_weight = self.done[s]
        finished = next_weight if weight else next_backward
        limit, time = limit_after(finished), (yield)
        now = time  # the clock: no stage starts anything earlier
        while True:
            backward_at = backward_ready[next_backward]
            if (
                between
                and backward_at <= time
                and next_weight < next_backward
                and not forward_limit.backward_fits(next_forward, next_backward, next_weight)
            ):
                next_action[s] = time = weight_ends[next_weight] = time + weight[next_weight]
                next_weight += 1
                limit = limit_after(next_weight)
            elif backward_at <= time:
                next_action[s] = time = backward_ends[next_backward] = time + backward[next_backward]
                next_backward += 1
                if not weight:
                    limit = limit_after(next_backward)
                if time < idle_until[before]:  # wake the stage that the gradient goes to
                    next_action[before] = idle_until[before] = time
            elif (
                next_forward < limit
                and forward_ready[next_forward] <= time
                and (not between or forward_fits(next_forward, next_backward, next_weight))
            ):
                next_action[s] = time = forward_ends[next_forward] = time + forward[next_forward]
                next_forward += 1
                if time < idle_until[after]:
                    next_action[after] = idle_until[after] = time
            elif weight and next_weight < next_backward:
                next_action[s] = time = weight_ends[next_weight] = time + weight[next_weight]
                next_weight += 1
                limit = limit_after(next_weight)
            else:
                # Nothing is ready: sleep until the earliest known input, or until a neighbour wakes the
                # stage.
                may_start = next_forward < limit and (
                    not between or forward_fits(next_forward, next_backward, next_weight)
                )
                wake = min(backward_at, forward_ready[next_forward]) if may_start else backward_at
                next_action[s] = idle_until[s] = wake
                now = yield
                idle_until[s] = 0
                spare -= now - time
                if spare < 0:
                    raise _EndsTooLate
                time = now
                continue

            # The stage has ended a task at `time`. A ready backward comes first in any case.
            if (backward_at := backward_ready[next_backward]) <= time:
                continue
            # Otherwise an input that is still unknown may arrive by then: not before the neighbour acts again
            # (an
            # idle one may act now) and has done it. If it may, let the clock catch up before choosing.
            gradient_may_come = (
                backward_at == NEVER_NS
                and (now if idle_until[after] else next_action[after]) + backward_after[next_backward] <= time
            )
            if gradient_may_come or (
                next_forward < limit
                and forward_ready[next_forward] == NEVER_NS
                and (now if idle_until[before] else next_action[before]) + forward_before[next_forward]
                <= time
                and (not between or forward_fits(next_forward, next_backward, next_weight))
            ):
                time = now = yield
