"""One replica of a pipeline in virtual time: how its stages pass the micro-batches of a queue on, and when each comes and goes.

The stages take micro-batches in the queue's order. A free stage runs a backward if one is there, else the next forward if that is there
and the stage has room for it, else the second part of a backward, whichever is the oldest: what `runtime/timeline.py` does with the same
queue, but without the other ranks, which takes a tenth of the time. Two orders of one replica are compared in a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
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
    last part of the backward. `weight` is empty where backwards are not split."""

    forward: Sequence[Sequence[int]]
    backward: Sequence[Sequence[int]]
    weight: Sequence[Sequence[int]]
    rooms: Sequence[int]

    def run(self, queue: Sequence[int], ready: Sequence[int]) -> Passage:
        """The passage of the micro-batches in `queue`, each of which the first stage has no earlier than `ready` says."""
        return _Run(self, queue, ready).run()


class _Run:
    """The state of a run. At each stage `came` and `back` are when forwards and backwards may start, in the queue's order."""

    def __init__(self, lane: Lane, queue: Sequence[int], ready: Sequence[int]) -> None:
        parts = (lane.forward, lane.backward, lane.weight)
        self.forward, self.backward, self.weight = ([[column[m] for m in queue] for column in part] for part in parts)
        self.count, self.stages = len(queue), len(lane.forward)
        self.rooms = [room or self.count for room in lane.rooms]
        self.came: list[list[int]] = [[] for _ in self.forward]
        self.came[0] = [ready[m] for m in queue]
        self.back: list[list[int]] = [[] for _ in self.forward]

    def run(self) -> Passage:
        forward, backward, weight, rooms, came, back = self.forward, self.backward, self.weight, self.rooms, self.came, self.back
        last, split = self.stages - 1, bool(weight)
        went, returned, finished = ([0] * self.stages for _ in range(3))  # how many jobs of each kind a stage has started
        if not split:
            finished = returned
        free = [0] * self.stages  # when a stage ends its job
        wakes = [0] * self.stages  # when a stage without a job looks for one
        starts, backs, end = list[int](), list[int](), 0
        bits, mask = self.stages.bit_length(), (1 << self.stages.bit_length()) - 1
        events = list(range(self.stages))  # (time << bits) + stage, which orders by time
        while events:
            event = heappop(events)
            time, s = event >> bits, event & mask
            if time < free[s]:
                continue
            i, j, to = returned[s], went[s], s
            soon = back[s][i] if i < len(back[s]) else NEVER
            next_forward = came[s][j] if j < len(came[s]) and j - finished[s] < rooms[s] else NEVER
            if soon <= time:
                done = time + backward[s][i]
                returned[s] = i + 1
                if s:
                    to = s - 1
                    back[to].append(done)
                else:
                    backs.append(done)
            elif next_forward <= time:
                done = time + forward[s][j]
                went[s] = j + 1
                if s < last:
                    to = s + 1
                    came[to].append(done)
                else:
                    back[s].append(done)
                if not s:
                    starts.append(time)
            elif split and finished[s] < i:
                done = time + weight[s][finished[s]]
                finished[s] += 1
            else:
                wakes[s] = min(soon, next_forward)
                if wakes[s] < NEVER:
                    heappush(events, (wakes[s] << bits) + s)
                continue
            free[s], wakes[s], end = done, 0, max(end, done)
            heappush(events, (done << bits) + s)
            if done < wakes[to]:
                wakes[to] = done
                heappush(events, (done << bits) + to)
        return Passage(end, starts, backs)
