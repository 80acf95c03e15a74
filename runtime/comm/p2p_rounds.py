"""`--comm rounds`: all messages of a step in numbered rounds, each a `batch_isend_irecv`, that every rank
enters in one order.

This is the conservative choice. Messages usually have a process group per directed edge and travel as they
come (`p2p_channels`); here one group carries all of them. The programs are simulated beforehand in beats. In
a beat every rank passes at most one forward or backward, and the messages sent in it form one round, which
senders and receivers enter after that instruction.

A beat needs only what earlier rounds have delivered, and a round completes once its ranks have entered it. By
induction over the rounds no rank waits forever, even where one stream carries all messages of a rank in
order. The price: a rank that computes for long enters late and delays the senders of the same round. The
simulation is deterministic, so all ranks find the same rounds without communicating.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from secc.runtime.comm.edge_messages import EdgeLayout
from secc.runtime.comm.p2p_channels import (
    Message,
    Transport,
    as_sendable,
    check_header,
    message_of_instruction,
)
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import COMPUTE_KINDS, Instruction, Schedule, gather_rounds

RoundMessageKey = tuple[object, ...]  # identifies a message on both of its ranks
NumberedMessage = tuple[int, Message]  # a message and its number within the step


@dataclass
class P2PRound:
    """What a rank sends and receives in one round. The numbers of messages serve as tags."""

    sends: list[NumberedMessage] = field(default_factory=list)
    receives: list[NumberedMessage] = field(default_factory=list)


RoundsByInstruction = dict[int, list[P2PRound]]  # rounds that a rank enters before an instruction


def plan_rounds(schedule: Schedule, sections: Iterable[Section]) -> list[RoundsByInstruction]:
    """Return each rank's rounds. Raises RuntimeError if the programs deadlock; the schedule must have
    passed its check."""
    return _RoundPlanner(schedule, sections).run()


class _RoundPlanner:
    """Simulates the programs beat by beat. `next_index[rank]` is the rank's next instruction."""

    def __init__(self, schedule: Schedule, sections: Iterable[Section]) -> None:
        self.programs, self.next_index = schedule.programs, [0] * len(schedule.programs)
        self.lockstep_rounds = gather_rounds(sections, schedule.micro_batches)
        self.participant_counts = Counter(
            self.compute_key(i) for p in self.programs for i in p if i.kind in COMPUTE_KINDS
        )
        # Ranks that have reached a forward or backward, by its key.
        self.waiting_ranks: defaultdict[RoundMessageKey, set[int]] = defaultdict(set)
        self.arrived = set[RoundMessageKey]()
        self.rounds_by_rank: list[RoundsByInstruction] = [{} for _ in self.programs]
        self.message_count = 0

    def run(self) -> list[RoundsByInstruction]:
        while any(at < len(p) - 1 for at, p in zip(self.next_index, self.programs, strict=True)):
            before = list(self.next_index)
            sent = [
                message for rank in range(len(self.programs)) for message in self.advance_to_compute(rank)
            ]
            for ranks in [
                r for job, r in self.waiting_ranks.items() if len(r) == self.participant_counts[job]
            ]:
                for rank in sorted(ranks):
                    self.next_index[rank] += 1
                    sent += self.pass_sends(rank)
            self.waiting_ranks = defaultdict(
                set,
                {job: r for job, r in self.waiting_ranks.items() if len(r) < self.participant_counts[job]},
            )
            self.close_round(sent)
            if before == self.next_index and not sent:
                raise RuntimeError("the programs wait for each other: they have not been checked")
        return self.rounds_by_rank

    def advance_to_compute(self, rank: int) -> list[tuple[int, Instruction]]:
        """Advance a rank to its next forward or backward, or to a message that has not arrived. Returns
        what it sends on the way."""
        program, sent = self.programs[rank], list[tuple[int, Instruction]]()
        while self.next_index[rank] < len(program) - 1:  # up to STEP
            i = program[self.next_index[rank]]
            if i.kind in COMPUTE_KINDS:
                self.waiting_ranks[self.compute_key(i)].add(rank)
                break
            if i.kind == "RECV" and _message_key(i, rank) not in self.arrived:
                break
            sent += [(rank, i)] if i.kind == "SEND" else []
            self.next_index[rank] += 1
        return sent

    def pass_sends(self, rank: int) -> list[tuple[int, Instruction]]:
        """Advance a rank over consecutive SENDs, and return them."""
        program, start = self.programs[rank], self.next_index[rank]
        while self.next_index[rank] < len(program) and program[self.next_index[rank]].kind == "SEND":
            self.next_index[rank] += 1
        return [(rank, i) for i in program[start : self.next_index[rank]]]

    def close_round(self, sent: list[tuple[int, Instruction]]) -> None:
        """Deliver the messages of a beat. Their ranks enter the round at their present instruction."""
        entered: dict[int, P2PRound] = {}
        for rank, i in sent:
            message = message_of_instruction(i)
            entered.setdefault(rank, P2PRound()).sends.append((self.message_count, message))
            entered.setdefault(i.peer, P2PRound()).receives.append(
                (self.message_count, replace(message, peer=rank))
            )
            self.arrived.add(_message_key(i, rank))
            self.message_count += 1
        for rank, exchange in entered.items():
            self.rounds_by_rank[rank].setdefault(self.next_index[rank], []).append(exchange)

    def compute_key(self, i: Instruction) -> RoundMessageKey:
        """Identify a forward or backward that several ranks run together: by its micro-batch, or by the
        first one of its lockstep round."""
        lockstep = self.lockstep_rounds.get((i.section, i.micro))
        return (i.kind, i.section, lockstep[0].index if lockstep is not None else i.micro)


def _message_key(i: Instruction, rank: int) -> RoundMessageKey:
    """Identify a message on both of its ranks."""
    ends = (rank, i.peer) if i.kind == "SEND" else (i.peer, rank)
    return i.edge, i.direction, i.src_micro, i.dst_micro, *ends


class RoundTransport(Transport):
    """The point-to-point messages of one rank, in rounds. Made on all ranks in the same order."""

    def _create_groups(self, plan: Plan) -> dict[tuple[str, str, bool], Any]:
        self._group: Any = dist.new_group(list(range(plan.world_size)))
        if self.device.type == "cuda":
            # The first operation of an NCCL group must not be a batch of P2P operations.
            dist.all_reduce(torch.zeros(1, device=self.device), group=self._group)
        return {}

    def start_step(self, layouts: Mapping[str, EdgeLayout], schedule: Schedule) -> None:
        self.begin_program(layouts, ())
        self._rounds = plan_rounds(schedule, self._sections)[self.rank]
        self._outgoing: dict[Message, torch.Tensor] = {}
        self._works: list[tuple[dist.Work, list[torch.Tensor]]] = []  # and the buffers that they read
        self._arriving: dict[Message, tuple[list[dist.Work], list[torch.Tensor]]] = {}

    def advance_to(self, index: int) -> None:
        for exchange in self._rounds.get(index, ()):
            self._enter_round(exchange)

    def send(self, message: Message, values: torch.Tensor) -> None:
        """Keep `values`, a 1-D buffer that nothing else uses, until the round."""
        self._outgoing[message] = values

    def receive(self, message: Message) -> None:
        """Do nothing: the round of this RECV has been entered."""

    def take_values(self, message: Message) -> torch.Tensor:
        """Wait for a message and return its values. Each message is taken once."""
        works, (values, *headers) = self._arriving.pop(message)
        for work in works:
            work.wait()
        for received in headers:
            check_header(message, received, self._make_header(message, values.numel(), values.dtype))
        return values

    def finish_step(self) -> None:
        """Wait until everything that was sent in this step has been received."""
        for work, _ in self._works:
            work.wait()
        self._works.clear()

    def _enter_round(self, exchange: P2PRound) -> None:
        outgoing, incoming = list[dist.P2POp](), list[dist.P2POp]()
        for n, m in exchange.sends:
            outgoing += self._p2p_ops(
                dist.isend, n, m, self._with_header(m, self._outgoing.pop(m), fill=True)
            )
        places: list[tuple[Message, list[torch.Tensor], slice]] = []
        for n, m in exchange.receives:
            layout = self._step.layouts[m.edge]
            tensors = self._with_header(
                m, torch.empty(m.numel(layout), dtype=layout.dtype, device=self.device), fill=False
            )
            before = len(outgoing) + len(incoming)
            incoming += self._p2p_ops(dist.irecv, n, m, tensors)
            places.append((m, tensors, slice(before, len(outgoing) + len(incoming))))
        ops = outgoing + incoming
        works = dist.batch_isend_irecv(ops) if ops else []
        # gloo returns a handle per operation, and each may be waited for once; NCCL returns one for all.
        each = works if len(works) == len(ops) else works[:1] * len(ops)
        self._works += [(work, [op.tensor]) for work, op in zip(each, outgoing, strict=False)]
        for m, tensors, place in places:
            self._arriving[m] = each[place], tensors

    def _with_header(self, message: Message, values: torch.Tensor, fill: bool) -> list[torch.Tensor]:
        """Return the values and, with `debug`, the header that travels before them, or a buffer for it."""
        if not self.debug or not values.numel():
            return [values]
        header = self._make_header(message, values.numel(), values.dtype)
        return [values, header if fill else torch.empty_like(header)]

    def _p2p_ops(
        self, op: Any, number: int, message: Message, tensors: list[torch.Tensor]
    ) -> list[dist.P2POp]:
        """Return the operations of a message, header first; none for a message without entries."""
        tagged = [(tensor, 2 * number + k) for k, tensor in enumerate(tensors) if tensors[0].numel()]
        return [
            dist.P2POp(op, as_sendable(tensor), message.peer, self._group, tag)
            for tensor, tag in reversed(tagged)
        ]
