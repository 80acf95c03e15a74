"""Executes step programs in modelled time, as the engine executes them on ranks.

Computation takes the plan's costs; the ranks of a replica compute together, and so do replicas that gather
parameters (ZeRO-3). As in `runtime/comm/p2p_channels.py`, a send is posted and never blocks, receives are
posted a window ahead of the program, a message moves once both its ends are posted and the links are free,
and a computation waits for the messages that it consumes. The sums of a section's gradients begin within its
last backwards, bucket by bucket as these become final, and overlap with what follows; those of one rank run
one after the other. At the end of its program a rank waits for its sends and sums, then all ranks wait for
each other (the global norm), then each takes its optimizer step. The gathers of updated parameters pass
behind the next step's first forwards; what these do not hide counts as the end of this step. Overheads of a
rank count, too: a task's is part of its cost, a message's occupies the sender, a step's (planning, metadata)
is added at its end.

Every simulation first checks the schedule (`runtime/validation/full_check.py`): completeness, dependencies,
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
from secc.runtime.comm.p2p_channels import RECEIVE_WINDOW
from secc.runtime.host.gc_control import pause_gc
from secc.runtime.parameters.reduction_times import run_reductions
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.replica_routes import ranks_by_replica, route_message, slice_bounds
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import (
    COMPUTE_KINDS,
    Instruction,
    SampleMeta,
    Schedule,
    gather_rounds,
    returns_gradient,
    weight_backward_ns,
)
from secc.runtime.validation.full_check import check_schedule
from secc.simulate.events import ComputeEvent, ReductionEvent, SimulatedStep, TransferEvent
from secc.simulate.link_contention import Network

# (edge, direction, producer's micro-batch, consumer's micro-batch, sender, receiver)
MessageKey = tuple[str, str, int, int, int, int]
ComputeKey = tuple[str, str, int, int]  # (kind, section, micro-batch, rank)


def simulate(
    plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule, traffic: Traffic | None = None
) -> SimulatedStep:
    """Simulates one step under the plan's costs and cluster. Raises ScheduleError for an invalid schedule."""
    with pause_gc():
        check_schedule(plan, samples, schedule)
        return _Simulator(plan, samples, schedule, traffic or Traffic(plan)).run()


@dataclass(slots=True)
class _SimulatedMessage:
    """A message; `send_posted` and `receive_posted` are the times when its ends were posted."""

    key: MessageKey
    sender: int
    receiver: int
    samples: tuple[int, ...]
    size: int
    send_posted: int | None = None
    receive_posted: int | None = None
    arrival: int | None = None
    receiver_waits: bool = False  # whether the receiver stands still for it


@dataclass(slots=True)
class _Rank:
    """State of a rank: its program, the next instruction, since when it is free, and its receives in
    program order."""

    program: Sequence[Instruction]
    next_instruction: int = 0
    free_at: int = 0
    receives: list[_SimulatedMessage] = field(default_factory=list)
    passed_receives: int = 0
    last_arrival: int = 0  # when its last message arrives
    packing: int = -1  # index of the SEND instruction that is packed now, or was packed last
    program_end: int | None = None


class _Simulator:
    """One simulation: runs ranks in order of time until all have ended."""

    def __init__(
        self, plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule, traffic: Traffic
    ) -> None:
        self.plan, self.samples, self.schedule, self.traffic = plan, tuple(samples), schedule, traffic
        self.network = Network(traffic)
        costs = PredictedCosts(plan, samples, schedule.own_samples)
        self.durations = {
            s.name: costs.micro_batch_times(s, [m.samples for m in schedule.micro_batches[s.name]])
            for s in plan.sections
        }
        self.sections = {s.name: s for s in plan.sections}
        self.replica_sizes = {s.name: s.mesh.replica_size for s in plan.sections}
        self.messages, self.consumed_messages = self._list_messages()
        self.ranks = [self._rank_state(program, rank) for rank, program in enumerate(schedule.programs)]
        in_step = gather_rounds(plan.sections, schedule.micro_batches)
        self.rounds = {key: tuple(m.index for m in together) for key, together in in_step.items()}
        # Ranks at a job that they do together: (instruction, waited, may start).
        self.waiting_together: dict[tuple[str, str, int], dict[int, tuple[Instruction, int, int]]] = (
            defaultdict(dict)
        )
        # By section: rank -> start, end of its last backward.
        self.last_backwards: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        self.first_forwards: dict[str, dict[int, int]] = defaultdict(dict)  # ns, by section and rank
        self.wake_times = [(0, rank) for rank in range(len(self.ranks))]
        self.compute: list[ComputeEvent] = []
        self.transfers: list[TransferEvent] = []
        self.reductions: list[ReductionEvent] = []

    def run(self) -> SimulatedStep:
        """Runs all ranks to their ends, then the reductions of tied parameters and the optimizer."""
        for index in range(len(self.ranks)):
            self.post_receives(index, 0)
        while self.wake_times:
            time, index = heapq.heappop(self.wake_times)
            self.resume_rank(index, time)
        stepped = tuple(self._program_end(index) for index in range(len(self.ranks)))
        timed = self.traffic.timed_reductions
        for reduction, *span in run_reductions(timed, self.last_backwards, stepped, self.first_forwards):
            self.reductions.append(ReductionEvent(reduction.sections, reduction.ranks, *span))
        synced = max(
            (
                *(max(stepped[i], r.last_arrival) for i, r in enumerate(self.ranks)),
                *(r.end for r in self.reductions),
            ),
            default=0,
        )
        own_samples = len(self.samples) if self.schedule.own_samples is None else self.schedule.own_samples
        updated = synced + max((self.traffic.optimizer_ns(r) for r in range(len(self.ranks))), default=0)
        end = updated + self.traffic.overheads.step_ns(own_samples)
        parts = (tuple(self.compute), tuple(self.transfers), tuple(self.reductions))
        return SimulatedStep(self.plan, self.samples, self.schedule, *parts, stepped, synced, end)

    def resume_rank(self, index: int, time: int) -> None:
        """Runs a rank from `time` until it computes, waits or ends."""
        rank = self.ranks[index]
        program = rank.program
        while rank.next_instruction < len(program):
            i = program[rank.next_instruction]
            kind = i.kind
            if kind in COMPUTE_KINDS:
                rank.next_instruction += self.start_computation(index, i)
                return
            if kind == "SEND":
                if not self.pack_message(rank, index, time):
                    return
                self.post_message_end(self.messages[self._message_key(i, index)], time, sent=True)
            elif kind == "RECV":
                rank.passed_receives += 1
                self.post_receives(index, time)
            elif kind == "REDUCE":
                self.last_backwards[i.section].setdefault(index, (time, time))
            elif kind == "STEP":
                rank.program_end = time
            else:
                raise ValueError(f"cannot simulate `{i}`")
            rank.next_instruction += 1

    # -- computation

    def start_computation(self, index: int, i: Instruction) -> bool:
        """Starts a computation if the arrival of all its messages is known; else the first missing one will
        wake the rank.

        Ranks that compute together wait for each other; the last one starts the computation for all of them.
        """
        rank = self.ranks[index]
        last_message, arrival = None, -1
        for m in self.consumed_messages.get((i.kind, i.section, i.micro, index), ()):
            if m.arrival is None:
                m.receiver_waits = True
                return False
            if m.arrival > arrival:
                last_message, arrival = m, m.arrival
        start = in_transit_from = max(rank.free_at, arrival)
        if last_message is not None and arrival > rank.free_at:
            in_transit_from = max(rank.free_at, last_message.send_posted or 0)
        lockstep = self.rounds.get((i.section, i.micro), (i.micro,))
        replica_size = self.replica_sizes[i.section]
        if replica_size == 1 and len(lockstep) == 1:
            self._record_computation(index, i, in_transit_from, start, start + self.computation_ns(i))
            return True
        together = self.waiting_together[i.kind, i.section, lockstep[0]]
        together[index] = i, in_transit_from, start
        if len(together) < replica_size * len(lockstep):
            return False
        start = max(at for _, _, at in together.values())
        end = start + max(self.computation_ns(i._replace(micro=m)) for m in lockstep)
        for member, (own, before, _) in together.items():
            self._record_computation(member, own, before, start, end)
            self.ranks[member].next_instruction += member != index  # the caller's own goes on there
        return True

    def _record_computation(self, index: int, i: Instruction, waited: int, start: int, end: int) -> None:
        rank = self.ranks[index]
        self.compute.append(
            ComputeEvent(
                index, i.kind, i.section, i.replica, i.stage, i.micro, rank.free_at, waited, start, end
            )
        )
        rank.free_at = end
        if i.kind == "F":
            self.first_forwards[i.section].setdefault(index, end - start)
        else:
            self.last_backwards[i.section][index] = start, end
        heapq.heappush(self.wake_times, (end, index))

    def computation_ns(self, i: Instruction) -> int:
        """Duration of an F, B or W instruction."""
        forward, backward = (column[i.micro] for column in self.durations[i.section])
        whole = i.micro in self.schedule.whole_backwards.get(i.section, ())
        weight = weight_backward_ns(self.sections[i.section], backward, whole)
        return {"F": forward, "B": backward - weight, "W": weight}[i.kind]

    # -- messages

    def pack_message(self, rank: _Rank, index: int, time: int) -> bool:
        """Whether a rank has packed the message that it sends; if not, packing starts and will wake the
        rank."""
        if rank.packing == rank.next_instruction or not self.traffic.overheads.message:
            return True
        rank.packing, rank.free_at = rank.next_instruction, time + self.traffic.overheads.message
        heapq.heappush(self.wake_times, (rank.free_at, index))
        return False

    def post_receives(self, index: int, time: int) -> None:
        """Posts receives up to a window ahead of the last one that the program has passed."""
        rank = self.ranks[index]
        first = rank.passed_receives + RECEIVE_WINDOW - 1 if rank.passed_receives else 0
        for message in rank.receives[first : rank.passed_receives + RECEIVE_WINDOW]:
            self.post_message_end(message, time, sent=False)

    def post_message_end(self, m: _SimulatedMessage, time: int, sent: bool) -> None:
        """Posts one end of a message; if the other one is posted too, the message moves."""
        if sent:
            m.send_posted = time
        else:
            m.receive_posted = time
        if m.send_posted is None or m.receive_posted is None:
            return
        start, m.arrival = self.network.send_message(m.sender, m.receiver, m.size, time)
        self.transfers.append(
            TransferEvent(
                *m.key[:4], m.sender, m.receiver, m.samples, m.size, m.send_posted, start, m.arrival
            )
        )
        sender = self.ranks[m.sender]
        sender.last_arrival = max(sender.last_arrival, m.arrival)
        if m.receiver_waits:
            heapq.heappush(self.wake_times, (time, m.receiver))

    def _list_messages(
        self,
    ) -> tuple[dict[MessageKey, _SimulatedMessage], dict[ComputeKey, list[_SimulatedMessage]]]:
        """All messages between ranks, and the messages that each computation consumes."""
        ranks_of = {
            (n, m.index): ranks_by_replica(self.sections[n])[m.replica]
            for n, micros in self.schedule.micro_batches.items()
            for m in micros
        }
        messages: dict[MessageKey, _SimulatedMessage] = {}
        needs: dict[ComputeKey, list[_SimulatedMessage]] = defaultdict(list)
        for e in self.plan.edges:
            layout = EdgeLayout(e, self.plan, self.schedule, self.samples)
            flag = {"fwd": 0, "bwd": 1}  # gradients are followed by a flag
            for pair, samples in layout.pairs.items():
                a, b, entries = ranks_of[e.src, pair[0]], ranks_of[e.dst, pair[1]], layout.message_numel(pair)
                transfers = [("fwd", ("F", e.dst, pair[1]), route_message(a, b))]
                transfers += (
                    [("bwd", ("B", e.src, pair[0]), route_message(b, a))]
                    if returns_gradient(e, self.sections)
                    else []
                )
                for direction, consumer, parts in transfers:
                    for part in parts:
                        start, stop = slice_bounds(entries, part.index, part.count)
                        key = (e.name, direction, *pair, part.sender, part.receiver)
                        size = (stop - start + flag[direction]) * layout.dtype.itemsize
                        message = _SimulatedMessage(key, part.sender, part.receiver, samples, size)
                        messages[key] = message
                        needs[*consumer, part.receiver].append(message)
        return messages, needs

    def _rank_state(self, program: Sequence[Instruction], index: int) -> _Rank:
        received = (self._message_key(i, index) for i in program if i.kind == "RECV")
        return _Rank(program, receives=[self.messages[key] for key in received])

    def _message_key(self, i: Instruction, index: int) -> MessageKey:
        ends = (index, i.peer) if i.kind == "SEND" else (i.peer, index)
        return i.edge, i.direction, i.src_micro, i.dst_micro, *ends

    def _program_end(self, index: int) -> int:
        stepped = self.ranks[index].program_end
        if stepped is None:
            raise RuntimeError(f"rank {index} never ends: the check accepted a schedule that blocks")
        return stepped
