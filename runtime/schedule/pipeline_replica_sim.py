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

NEVER = 1 << 62

Times = list[list[int]]  # at each stage, of each micro-batch of the queue


class Passage(NamedTuple):
    """When the last job ends, and when the first stage starts the forward and ends the backward of each in
    the queue; and the ends of all forwards, backwards and second parts of these, which stages without any
    have none of. All in ns."""

    end: int
    starts: list[int]
    backs: list[int]
    ends: tuple[Times, Times, Times]


@dataclass(frozen=True)
class Lane:
    """A pipeline's stages: for each the times of all micro-batches there may be, and for how many it has room
    between forward and the last part of the backward. `weight` is empty where backwards are not split.
    `kept`: bytes that the micro-batches keep, () where their room is not bounded, and `spaces` that for
    them."""

    forward: Sequence[Sequence[int]]
    backward: Sequence[Sequence[int]]
    weight: Sequence[Sequence[int]]
    rooms: Sequence[int]
    kept: Sequence[Sequence[int]] = ()
    spaces: Sequence[int] = ()

    def run(self, queue: Sequence[int], ready: Sequence[int]) -> Passage:
        """The passage of the micro-batches in `queue`, each of which the first stage has no earlier than
        `ready` says."""
        return _Run(self, queue, ready).run()

    @cached_property
    def alike(self) -> list[int]:
        """For each stage the first one that has room for the same."""
        rooms = [
            (self.kept[s] if self.kept else (), self.spaces[s] if self.kept else 0, room)
            for s, room in enumerate(self.rooms)
        ]
        return [rooms.index(room) for room in rooms]

    def limits(self, stage: int, queue: Sequence[int]) -> list[int]:
        """How many forwards a stage may have started while it has finished none, one, two ... of the queue:
        one more at least."""
        count = len(queue)
        room = self.rooms[stage] or count
        if not self.kept or not self.kept[stage]:
            return [min(room + finished, count) for finished in range(count + 1)]
        before, space = (
            [0, *accumulate(map(self.kept[stage].__getitem__, queue))],
            self.spaces[stage],
        )  # bytes of all before each
        limits, most = list[int](), 0
        for finished, taken in enumerate(before):
            most = max(most, finished + 1)
            while most < count and before[most + 1] - taken <= space:
                most += 1
            limits.append(min(most, finished + room, count))
        return limits


class _Run:
    """The state of a run. At each stage `came` and `back` are when forwards and backwards may start, in the
    queue's order, and so when they ended at the stage before or behind; `weights` are when second parts
    ended.

    `acts`: when each stage looks for a job next; `idle`: the same where it has none, else 0. At the end both
    have what is no stage.
    """

    def __init__(self, lane: Lane, queue: Sequence[int], ready: Sequence[int]) -> None:
        count, stages = len(queue), len(lane.forward)
        parts = (lane.forward, lane.backward, lane.weight)
        self.times = [[list(map(column.__getitem__, queue)) for column in part] for part in parts]
        limits = {s: lane.limits(s, queue) for s in set(lane.alike)}
        self.limits = [limits[s] for s in lane.alike]
        self.came = [[*map(ready.__getitem__, queue), NEVER], *([NEVER] * (count + 1) for _ in range(stages))]
        self.back = [
            [0] * count,
            *([NEVER] * (count + 1) for _ in range(stages)),
        ]  # behind each stage, and behind what is before the first
        self.back[-1] = self.came[-1]  # the last stage's forwards are all that its backwards wait for
        self.weights = [[0] * count for _ in lane.weight]
        self.acts, self.idle = [*[0] * stages, NEVER], [0] * (stages + 1)

    def run(self) -> Passage:
        acts, parts = self.acts, [self.stage(s) for s in range(len(self.limits))]
        for part in parts:
            next(part)
        stages = [part.send for part in parts]
        while (time := min(acts)) < NEVER:
            stages[acts.index(time)](time)
        forwards, backwards = (
            [ends[:-1] for ends in self.came[1:]],
            [self.back[0], *(ends[:-1] for ends in self.back[1:-1])],
        )
        end = max((ends[-1] for ends in self.weights or backwards if ends), default=0)
        starts = list(map(int.__sub__, forwards[0], self.times[0][0]))
        return Passage(end, starts, self.back[0], (forwards, backwards, self.weights))

    def stage(self, s: int) -> Generator[None, int, None]:
        """A stage: starts a job at each time that it is sent, and at the end of a job the next one if what
        that depends on is known.

        What is not known yet does not come before the stages beside it have had time to do it.
        """
        forward, backward, *later = (part[s] for part in self.times if part)
        weight, weights, acts, idle, limits = (
            later[0] if later else [],
            self.weights[s : s + 1],
            self.acts,
            self.idle,
            self.limits[s],
        )
        came, passed, returned, back = self.came[s], self.came[s + 1], self.back[s], self.back[s + 1]
        finishes, before, behind = weights[0] if weights else [], s - 1, s + 1
        next_forward = next_backward = finished = 0
        first, last = (
            self.times[0][before],
            [*self.times[1][behind % len(self.limits)], NEVER],
        )  # of the stages beside
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
            if (soon == NEVER and (now if idle[behind] else acts[behind]) + last[next_backward] <= time) or (
                next_forward < limit
                and came[next_forward] == NEVER
                and (now if idle[before] else acts[before]) + first[next_forward] <= time
            ):
                time = now = yield
