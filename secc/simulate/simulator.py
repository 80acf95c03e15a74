"""The simulator: executes the programs that ranks execute, in modelled time, as the engine executes them.

Computation takes the plan's costs, and the ranks of a replica compute together, as do replicas that gather
parameters. As in `runtime/comm/p2p_channels.py`, a send is posted and never blocks, receives are posted a
window ahead of the program, a message moves once both its ends are posted and the links are free, and a
computation waits for the messages that it consumes. A reduction starts when all its ranks have reached it and
runs beside what follows; one rank's reductions follow each other. At the end of its program a rank waits for
its sends and reductions, then all ranks wait for each other (the global norm), then each takes its optimizer
step. What a rank does beside computing counts, too: a job's overhead is in its costs, a message's keeps the
sender busy, a step's (planning, metadata) stands at its end.

Every simulation checks the schedule first (`runtime/validation/full_check.py`): completeness, dependencies,
order of channels, no deadlock. Events are processed in order of time and rank, so the same input gives the
same result.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from secc.bounds.traffic import Traffic
from secc.runtime.comm.edge_messages import EdgeLayout
from secc.runtime.comm.p2p_channels import WINDOW
from secc.runtime.host.gc_control import collector_paused
from secc.runtime.parameters.gradient_reduction import Holders
from secc.runtime.plan.predicted_costs import Costs
from secc.runtime.plan.replica_routes import bounds, replicas, routes
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import (
    COMPUTE,
    Instruction,
    SampleMeta,
    Schedule,
    returns_gradient,
    rounds,
    weight_part,
)
from secc.runtime.validation.full_check import check
from secc.simulate.events import Compute, Reduction, Simulated, Transfer
from secc.simulate.link_contention import Network

Key = tuple[
    str, str, int, int, int, int
]  # edge, direction, producer's and consumer's micro-batch, sender, receiver
Job = tuple[str, str, int, int]  # kind, section, micro-batch, rank


def simulate(
    plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule, traffic: Traffic | None = None
) -> Simulated:
    """One step under the plan's costs and cluster. Raises ScheduleError for a schedule that must not run."""
    with collector_paused():
        check(plan, samples, schedule)
        return _Machine(plan, samples, schedule, traffic or Traffic(plan)).run()


@dataclass(slots=True)
class _Message:
    """A message that has not arrived; `sent` and `expected` are when its ends were posted."""

    sender: int
    receiver: int
    samples: tuple[int, ...]
    size: int
    sent: int | None = None
    expected: int | None = None
    arrival: int | None = None
    waiting: bool = False  # whether the receiver stands still for it


@dataclass(slots=True)
class _Rank:
    """Where a rank is: the next instruction, since when it is free, its receives in program order and how
    many it passed."""

    program: Sequence[Instruction]
    at: int = 0
    free: int = 0
    receives: list[Key] = field(default_factory=list)
    passed: int = 0
    reduced: int = 0  # when its last reduction ends
    sent: int = 0  # when its last message arrives
    packing: int = -1  # the SEND whose message it packs, or has packed last
    stepped: int | None = None


class _Machine:
    def __init__(
        self, plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule, traffic: Traffic
    ) -> None:
        self.plan, self.samples, self.schedule, self.traffic = plan, tuple(samples), schedule, traffic
        self.network = Network(traffic)
        costs = Costs(plan, samples, schedule.own)
        self.durations = {
            s.name: costs.of(s, [m.samples for m in schedule.micro_batches[s.name]]) for s in plan.sections
        }
        self.sections = {s.name: s for s in plan.sections}
        self.messages, self.needs = self._messages()
        self.ranks = [self._rank(program, rank) for rank, program in enumerate(schedule.programs)]
        in_step = rounds(plan.sections, schedule.micro_batches)
        self.rounds = {key: tuple(m.index for m in together) for key, together in in_step.items()}
        # Ranks at a job that they do together: (instruction, waited, may start).
        self.joined: dict[tuple[str, str, int], dict[int, tuple[Instruction, int, int]]] = defaultdict(dict)
        self.arrived: dict[Holders, list[int]] = defaultdict(list)
        self.wakes = [(0, rank) for rank in range(len(self.ranks))]
        self.compute: list[Compute] = []
        self.transfers: list[Transfer] = []
        self.reductions: list[Reduction] = []

    def run(self) -> Simulated:
        for index in range(len(self.ranks)):
            self.post_receives(index, 0)
        while self.wakes:
            time, index = heapq.heappop(self.wakes)
            self.resume(index, time)
        stepped = tuple(self._stepped(index) for index in range(len(self.ranks)))
        for held in self.traffic.held:
            if len(held.sections) > 1:  # tied over sections: reduced at the end
                self.reduce(held, max(stepped[r] for r in held.ranks))
        synced = max((max(stepped[i], r.reduced, r.sent) for i, r in enumerate(self.ranks)), default=0)
        own = len(self.samples) if self.schedule.own is None else self.schedule.own
        updated = synced + max((self.traffic.optimizer_ns(r) for r in range(len(self.ranks))), default=0)
        end = updated + self.traffic.overheads.step_ns(own)
        parts = (tuple(self.compute), tuple(self.transfers), tuple(self.reductions))
        return Simulated(self.plan, self.samples, self.schedule, *parts, stepped, synced, end)

    def resume(self, index: int, time: int) -> None:
        """Run a rank from `time` until it computes, waits or ends."""
        rank = self.ranks[index]
        while rank.at < len(rank.program):
            i = rank.program[rank.at]
            if i.kind in COMPUTE and not self.start(index, i):
                return
            if i.kind == "SEND" and not self.packed(rank, index, time):
                return
            rank.at += 1
            match i.kind:
                case "F" | "B" | "W":
                    return
                case "SEND":
                    self.post(self._key(i, index), time, sent=True)
                case "RECV":
                    rank.passed += 1
                    self.post_receives(index, time)
                case "REDUCE":
                    self.arrive(i, index, time)
                case "STEP":
                    rank.stepped = time
                case _:
                    raise ValueError(f"cannot simulate `{i}`")

    # -- computation
    # --------------------------------------------------------------------------------------------------------------

    def start(self, index: int, i: Instruction) -> bool:
        """Compute, if the arrival of all that is needed is known; otherwise the rank will be woken by the
        first that is not.

        The last rank of a replica lets the others start, too.
        """
        rank, messages = (
            self.ranks[index],
            [self.messages[k] for k in self.needs[i.kind, i.section, i.micro, index]],
        )
        missing = next((m for m in messages if m.arrival is None), None)
        if missing is not None:
            missing.waiting = True
            return False
        last = max(messages, key=lambda m: m.arrival or 0, default=None)
        arrival = last.arrival or 0 if last is not None else 0
        start = max(rank.free, arrival)
        waited = start if arrival <= rank.free or last is None else max(rank.free, last.sent or 0)
        in_step = self.rounds.get((i.section, i.micro), (i.micro,))
        together = self.joined[i.kind, i.section, in_step[0]]
        together[index] = i, waited, start
        if len(together) < self.sections[i.section].mesh.tp * len(in_step):
            return False
        start = max(at for _, _, at in together.values())
        end = start + max(self.duration(i._replace(micro=m)) for m in in_step)
        for member, (own, before, _) in together.items():
            self._compute(member, own, before, start, end)
            self.ranks[member].at += member != index  # the caller's own goes on there
        return True

    def _compute(self, index: int, i: Instruction, waited: int, start: int, end: int) -> None:
        rank = self.ranks[index]
        self.compute.append(
            Compute(index, i.kind, i.section, i.replica, i.stage, i.micro, rank.free, waited, start, end)
        )
        rank.free = end
        heapq.heappush(self.wakes, (end, index))

    def duration(self, i: Instruction) -> int:
        forward, backward = (column[i.micro] for column in self.durations[i.section])
        weight = weight_part(self.sections[i.section], backward)
        return {"F": forward, "B": backward - weight, "W": weight}[i.kind]

    # -- messages
    # -----------------------------------------------------------------------------------------------------------------

    def packed(self, rank: _Rank, index: int, time: int) -> bool:
        """Whether a rank has packed the message that it sends; otherwise it starts to, and will be woken."""
        if rank.packing == rank.at or not self.traffic.overheads.message:
            return True
        rank.packing, rank.free = rank.at, time + self.traffic.overheads.message
        heapq.heappush(self.wakes, (rank.free, index))
        return False

    def post_receives(self, index: int, time: int) -> None:
        """Post the receives up to a window beyond those that the program passed."""
        rank = self.ranks[index]
        first = rank.passed + WINDOW - 1 if rank.passed else 0
        for key in rank.receives[first : rank.passed + WINDOW]:
            self.post(key, time, sent=False)

    def post(self, key: Key, time: int, sent: bool) -> None:
        """One end of a message is ready; if the other is, too, it moves."""
        m = self.messages[key]
        if sent:
            m.sent = time
        else:
            m.expected = time
        if m.sent is None or m.expected is None:
            return
        start, m.arrival = self.network.send(m.sender, m.receiver, m.size, time)
        self.transfers.append(
            Transfer(*key[:4], m.sender, m.receiver, m.samples, m.size, m.sent, start, m.arrival)
        )
        self.ranks[m.sender].sent = max(self.ranks[m.sender].sent, m.arrival)
        if m.waiting:
            heapq.heappush(self.wakes, (time, m.receiver))

    def _messages(self) -> tuple[dict[Key, _Message], dict[Job, list[Key]]]:
        """Every message between ranks, and which of them each computation consumes."""
        place = {
            (n, m.index): replicas(self.sections[n])[m.replica]
            for n, micros in self.schedule.micro_batches.items()
            for m in micros
        }
        messages: dict[Key, _Message] = {}
        needs: dict[Job, list[Key]] = defaultdict(list)
        for e in self.plan.edges:
            layout = EdgeLayout(e, self.plan, self.schedule, self.samples)
            flag = {"fwd": 0, "bwd": 1}  # gradients are followed by a flag
            for pair, shared in layout.pairs.items():
                a, b, entries = place[e.src, pair[0]], place[e.dst, pair[1]], layout.numel(pair)
                ways = [("fwd", ("F", e.dst, pair[1]), routes(a, b))]
                ways += (
                    [("bwd", ("B", e.src, pair[0]), routes(b, a))]
                    if returns_gradient(e, self.sections)
                    else []
                )
                for direction, used, parts in ways:
                    for part in parts:
                        start, stop = bounds(entries, part.index, part.count)
                        key = (e.name, direction, *pair, part.sender, part.receiver)
                        size = (stop - start + flag[direction]) * layout.dtype.itemsize
                        messages[key] = _Message(part.sender, part.receiver, shared, size)
                        needs[*used, part.receiver].append(key)
        return messages, needs

    def _rank(self, program: Sequence[Instruction], index: int) -> _Rank:
        return _Rank(program, receives=[self._key(i, index) for i in program if i.kind == "RECV"])

    def _key(self, i: Instruction, index: int) -> Key:
        ends = (index, i.peer) if i.kind == "SEND" else (i.peer, index)
        return i.edge, i.direction, i.src_micro, i.dst_micro, *ends

    # -- the end of the step
    # ------------------------------------------------------------------------------------------------------

    def arrive(self, i: Instruction, index: int, time: int) -> None:
        """A rank reaches the reduction of a section; the last one starts it."""
        for held in self.traffic.held:
            if held.sections == (i.section,) and index in held.ranks:
                self.arrived[held].append(time)
                if len(self.arrived[held]) == len(held.ranks):
                    self.reduce(held, time)

    def reduce(self, held: Holders, ready: int) -> None:
        if len(held.ranks) < 2:
            return
        start = max([ready, *(self.ranks[r].reduced for r in held.ranks)])
        end = start + self.traffic.reduce_ns(held)
        for r in held.ranks:
            self.ranks[r].reduced = end
        self.reductions.append(Reduction(held.sections, held.ranks, start, end))

    def _stepped(self, index: int) -> int:
        stepped = self.ranks[index].stepped
        if stepped is None:
            raise RuntimeError(f"rank {index} never ends: the check accepted a schedule that blocks")
        return stepped
