"""One replica of a pipeline in virtual time: how its stages pass the micro-batches of a queue on, and when each comes and goes.

The stages take micro-batches in the queue's order. A free stage runs a backward if one is there, else the next forward if that is there
and the stage has room for it, else the second part of a backward, whichever is the oldest: what `runtime/timeline.py` does with the same
queue, but without the other ranks, which takes a tenth of the time. Two orders of one replica are compared in a millisecond.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

NEVER = 1 << 62


class Passage(NamedTuple):
    """When the last job ends, and when the first stage starts the forward and ends the backward of each in the queue. All in ns."""

    end: int
    starts: list[int]
    backs: list[int]


@dataclass(frozen=True)
class Lane:
    """A pipeline's stages: for each the times of all micro-batches there may be, and for how many it has room between forward and the
    last part of the backward. `weight` is empty where backwards are not split. `kept`: bytes that the micro-batches keep, () where their
    room is not bounded, and `spaces` that for them."""

    forward: Sequence[Sequence[int]]
    backward: Sequence[Sequence[int]]
    weight: Sequence[Sequence[int]]
    rooms: Sequence[int]
    kept: Sequence[Sequence[int]] = ()
    spaces: Sequence[int] = ()

    def run(self, queue: Sequence[int], ready: Sequence[int]) -> Passage:
        """The passage of the micro-batches in `queue`, each of which the first stage has no earlier than `ready` says."""
        return _Run(self, queue, ready).run()


class _Run:
    """The state of a run. At each stage `came` and `back` are when forwards and backwards may start, in the queue's order.

    `acts`: when each stage looks for a job next; `idle`: the same where it has none, else 0, as at the end, for what is no stage.
    """

    def __init__(self, lane: Lane, queue: Sequence[int], ready: Sequence[int]) -> None:
        count, stages = len(queue), len(lane.forward)
        parts = (lane.forward, lane.backward, lane.weight)
        self.times = [[list(map(column.__getitem__, queue)) for column in part] for part in parts]
        self.rooms = [room or count for room in lane.rooms]
        kept = [list(map(column.__getitem__, queue)) if column else [0] * count for column in lane.kept or [()] * stages]
        self.taken = [[0, *accumulate(column), 0] for column in kept]  # bytes of all before each in the queue
        self.spaces = lane.spaces or [0] * stages
        self.starts = [0] * count
        self.came = [[*map(ready.__getitem__, queue), NEVER], *([NEVER] * (count + 1) for _ in range(stages - 1))]
        self.back = [[NEVER] * (count + 1) for _ in range(stages)]
        self.backs = [0] * count
        self.acts, self.idle, self.ends = [0] * stages, [0] * (stages + 1), [0] * stages

    def run(self) -> Passage:
        acts, parts = self.acts, [self.stage(s) for s in range(len(self.acts))]
        for part in parts:
            next(part)
        stages = [part.send for part in parts]
        while (time := min(acts)) < NEVER:
            stages[acts.index(time)](time)
        return Passage(max(self.ends), self.starts, self.backs)

    def stage(self, s: int) -> Generator[None, int, None]:
        """A stage: starts a job at each time that it is sent."""
        forward, backward, *later = (part[s] for part in self.times if part)
        weight, acts, idle, room = later[0] if later else [], self.acts, self.idle, self.rooms[s]
        came, back, last = self.came[s], self.back[s], s == len(self.acts) - 1
        passed, returned = back if last else self.came[s + 1], self.back[s - 1] if s else self.backs
        taken, space = self.taken[s], self.spaces[s]
        next_forward = next_backward = finished = 0
        while True:
            time = yield
            soon = back[next_backward]
            fits = next_forward - finished < room and (taken[next_forward + 1] - taken[finished] <= space or next_forward == finished)
            comes = came[next_forward] if fits else NEVER
            if soon <= time:
                done = returned[next_backward] = time + backward[next_backward]
                next_backward, to = next_backward + 1, s - 1
                if not weight:
                    finished = next_backward
            elif comes <= time:
                if not s:
                    self.starts[next_forward] = time
                done = passed[next_forward] = time + forward[next_forward]
                next_forward, to = next_forward + 1, s + 1
            elif weight and finished < next_backward:
                done = time + weight[finished]
                finished, to = finished + 1, s
            else:
                acts[s] = idle[s] = min(soon, comes)
                continue
            acts[s] = self.ends[s] = done
            idle[s] = 0
            if done < idle[to]:
                acts[to] = idle[to] = done
