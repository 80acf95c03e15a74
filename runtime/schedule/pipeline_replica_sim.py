"""One replica of a pipeline in virtual time: how its stages pass the micro-batches of a queue on, and when
each comes and goes.

The stages take micro-batches in the queue's order. A free stage runs a backward if one is there, else the
next forward if that is there and the stage has room for it, else the second part of a backward, whichever is
the oldest: what `runtime/schedule/list_scheduler.py` does with the same queue, but without the other ranks,
which takes a third of the time. Two orders of one replica are compared in a millisecond.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

NEVER_NS = 1 << 62

StageTimes = list[list[int]]  # at each stage, of each micro-batch of the queue


class ReplicaTimeline(NamedTuple):
    """When the last job ends, and when the first stage starts the forward and ends the backward of each in
    the queue; and the ends of all forwards, backwards and second parts of these, which stages without any
    have none of. All in ns."""

    end: int
    starts: list[int]
    backward_ends: list[int]
    task_ends: tuple[StageTimes, StageTimes, StageTimes]


@dataclass(frozen=True)
class PipelineReplica:
    """A pipeline's stages: for each the times of all micro-batches there may be, and for how many it has room
    between forward and the last part of the backward. `weight` is empty where backwards are not split.
    `kept`: bytes that the micro-batches keep, () where their room is not bounded, and `spaces` that for
    them."""

    forward_ns: Sequence[Sequence[int]]
    backward_ns: Sequence[Sequence[int]]
    weight_ns: Sequence[Sequence[int]]
    max_in_flight: Sequence[int]
    saved_bytes: Sequence[Sequence[int]] = ()
    byte_limits: Sequence[int] = ()

    def simulate(self, queue: Sequence[int], ready: Sequence[int]) -> ReplicaTimeline:
        """The passage of the micro-batches in `queue`, each of which the first stage has no earlier than
        `ready` says."""
        return _ReplicaSimulation(self, queue, ready).run()

    @cached_property
    def first_stage_with_limits(self) -> list[int]:
        """For each stage the first one that has room for the same."""
        rooms = [
            (
                self.saved_bytes[s] if self.saved_bytes else (),
                self.byte_limits[s] if self.saved_bytes else 0,
                room,
            )
            for s, room in enumerate(self.max_in_flight)
        ]
        return [rooms.index(room) for room in rooms]

    def forward_limits(self, stage: int, queue: Sequence[int]) -> list[int]:
        """How many forwards a stage may have started while it has finished none, one, two ... of the queue:
        one more at least."""
        count = len(queue)
        room = self.max_in_flight[stage] or count
        if not self.saved_bytes or not self.saved_bytes[stage]:
            return [min(room + finished, count) for finished in range(count + 1)]
        # bytes of all before each
        before = [0, *accumulate(map(self.saved_bytes[stage].__getitem__, queue))]
        space = self.byte_limits[stage]
        limits, most = list[int](), 0
        for finished, taken in enumerate(before):
            most = max(most, finished + 1)
            while most < count and before[most + 1] - taken <= space:
                most += 1
            limits.append(min(most, finished + room, count))
        return limits


class _ReplicaSimulation:
    """The state of a run. At each stage `came` and `back` are when forwards and backwards may start, in the
    queue's order, and so when they ended at the stage before or behind; `weights` are when second parts
    ended.

    `acts`: when each stage looks for a job next; `idle`: the same where it has none, else 0. At the end both
    have what is no stage.
    """

    def __init__(self, lane: PipelineReplica, queue: Sequence[int], ready: Sequence[int]) -> None:
        count, stages = len(queue), len(lane.forward_ns)
        parts = (lane.forward_ns, lane.backward_ns, lane.weight_ns)
        self.times = [[list(map(column.__getitem__, queue)) for column in part] for part in parts]
        limits = {s: lane.forward_limits(s, queue) for s in set(lane.first_stage_with_limits)}
        self.forward_limits = [limits[s] for s in lane.first_stage_with_limits]
        self.forward_ready = [
            [*map(ready.__getitem__, queue), NEVER_NS],
            *([NEVER_NS] * (count + 1) for _ in range(stages)),
        ]
        self.backward_ready = [
            [0] * count,
            *([NEVER_NS] * (count + 1) for _ in range(stages)),
        ]  # behind each stage, and behind what is before the first
        self.backward_ready[-1] = self.forward_ready[
            -1
        ]  # the last stage's forwards are all that its backwards wait for
        self.weight_ends = [[0] * count for _ in lane.weight_ns]
        self.next_action, self.idle_until = [*[0] * stages, NEVER_NS], [0] * (stages + 1)

    def run(self) -> ReplicaTimeline:
        acts, parts = self.next_action, [self.run_stage(s) for s in range(len(self.forward_limits))]
        for part in parts:
            next(part)
        stages = [part.send for part in parts]
        while (time := min(acts)) < NEVER_NS:
            stages[acts.index(time)](time)
        forwards = [ends[:-1] for ends in self.forward_ready[1:]]
        backwards = [self.backward_ready[0], *(ends[:-1] for ends in self.backward_ready[1:-1])]
        end = max((ends[-1] for ends in self.weight_ends or backwards if ends), default=0)
        starts = list(map(int.__sub__, forwards[0], self.times[0][0]))
        return ReplicaTimeline(end, starts, self.backward_ready[0], (forwards, backwards, self.weight_ends))

    def run_stage(self, s: int) -> Generator[None, int, None]:
        """A stage: starts a job at each time that it is sent, and at the end of a job the next one if what
        that depends on is known.

        What is not known yet does not come before the stages beside it have had time to do it.
        """
        forward, backward, *later = (part[s] for part in self.times if part)
        weight = later[0] if later else []
        weights = self.weight_ends[s : s + 1]
        acts = self.next_action
        idle = self.idle_until
        limits = self.forward_limits[s]
        came = self.forward_ready[s]
        passed = self.forward_ready[s + 1]
        returned = self.backward_ready[s]
        back = self.backward_ready[s + 1]
        finishes, before, behind = weights[0] if weights else [], s - 1, s + 1
        next_forward = next_backward = finished = 0
        # of the stages beside
        first = self.times[0][before]
        last = [*self.times[1][behind % len(self.forward_limits)], NEVER_NS]
        limit, time = limits[0], (yield)
        now = time  # no stage starts a job before
        while True:
            if (soon := back[next_backward]) <= time:
                acts[s] = time = returned[next_backward] = time + backward[next_backward]
                next_backward += 1
                if not weight:
                    limit = limits[next_backward]
                if time < idle[before]:
                    acts[before] = idle[before] = time
            elif next_forward < limit and came[next_forward] <= time:
                acts[s] = time = passed[next_forward] = time + forward[next_forward]
                next_forward += 1
                if time < idle[behind]:
                    acts[behind] = idle[behind] = time
            elif weight and finished < next_backward:
                acts[s] = time = finishes[finished] = time + weight[finished]
                finished += 1
                limit = limits[finished]
            else:
                acts[s] = idle[s] = min(soon, came[next_forward]) if next_forward < limit else soon
                time = now = yield
                idle[s] = 0
                continue
            if (soon := back[next_backward]) <= time:
                continue
            if (
                soon == NEVER_NS and (now if idle[behind] else acts[behind]) + last[next_backward] <= time
            ) or (
                next_forward < limit
                and came[next_forward] == NEVER_NS
                and (now if idle[before] else acts[before]) + first[next_forward] <= time
            ):
                time = now = yield
