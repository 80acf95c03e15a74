"""The programs of all ranks, from one global order of forwards and backwards: where sends, receives and reductions go.

A SEND stands directly after the job that made its data. Receives on a channel (an edge, a direction and a pair of ranks) stand in
the order of the sends, because not every backend can match messages out of order; so before a job its rank receives what it needs
and what was sent before that on the same channel. Those were sent even earlier, so nothing waits longer for it. Gradients are
reduced after the last backward of the rank, sections in one order on all ranks: a rank that waits in a reduction then owes nobody
anything.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from secc.runtime.compose import Graph
from secc.runtime.plan import Plan
from secc.runtime.program import Instruction, MicroBatch, Schedule, replica_ranks, returns_gradient
from secc.runtime.timeline import Job, Timeline

Pairs = Mapping[str, Sequence[tuple[int, int]]]  # for each edge, (producer's, consumer's) micro-batch
JobKey = tuple[str, str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A tensor on its way from one rank to another, between two jobs."""

    edge: str
    direction: str
    src_micro: int
    dst_micro: int
    sender: int
    receiver: int
    target: JobKey

    @property
    def channel(self) -> tuple[str, str, int, int]:
        return self.edge, self.direction, self.sender, self.receiver

    def instruction(self, kind: str) -> Instruction:
        peer = self.receiver if kind == "SEND" else self.sender
        return Instruction(
            kind, edge=self.edge, direction=self.direction, peer=peer, src_micro=self.src_micro, dst_micro=self.dst_micro
        )


def emit(plan: Plan, graph: Graph, micros: dict[str, tuple[MicroBatch, ...]], pairs: Pairs, timeline: Timeline) -> Schedule:
    """The schedule whose ranks run their jobs in the timeline's order."""
    outgoing: dict[JobKey, list[Message]] = defaultdict(list)
    incoming: dict[JobKey, list[Message]] = defaultdict(list)
    for source, message in _messages(plan, micros, pairs):
        outgoing[source].append(message)
        incoming[message.target].append(message)
    place = {(j.kind, j.section, j.micro): i for i, j in enumerate(timeline.order)}
    underway: dict[tuple[str, str, int, int], deque[Message]] = defaultdict(deque)
    received: set[Message] = set()
    programs: list[list[Instruction]] = [[] for _ in range(plan.world_size)]
    for job in timeline.order:
        program, key = programs[job.rank], (job.kind, job.section, job.micro)
        for message in incoming[key]:
            queue = underway[message.channel]
            while message not in received:
                received.add(queue[0])
                program.append(queue.popleft().instruction("RECV"))
        program.append(_compute(job, micros))
        for message in sorted(outgoing[key], key=lambda m: place[m.target]):
            program.append(message.instruction("SEND"))
            underway[message.channel].append(message)
    for rank, program in enumerate(programs):
        program += _closing(graph, rank)
    return Schedule(micros, tuple(map(tuple, programs)))


def _messages(plan: Plan, micros: dict[str, tuple[MicroBatch, ...]], pairs: Pairs) -> Iterator[tuple[JobKey, Message]]:
    """Every message between different ranks, with the job that makes it."""
    sections = {s.name: s for s in plan.sections}
    ranks = {name: [replica_ranks(s)[m.replica] for m in micros[name]] for name, s in sections.items()}
    for edge in plan.edges:
        gradient = returns_gradient(edge, sections)
        for src, dst in pairs[edge.name]:
            a, b = ranks[edge.src][src], ranks[edge.dst][dst]
            if a != b:
                yield ("F", edge.src, src), Message(edge.name, "fwd", src, dst, a, b, ("F", edge.dst, dst))
                if gradient:
                    yield ("B", edge.dst, dst), Message(edge.name, "bwd", src, dst, b, a, ("B", edge.src, src))


def _compute(job: Job, micros: dict[str, tuple[MicroBatch, ...]]) -> Instruction:
    return Instruction(job.kind, job.section, replica=micros[job.section][job.micro].replica, micro=job.micro)


def _closing(graph: Graph, rank: int) -> Iterator[Instruction]:
    """Reductions from the last section to the first, whose backwards end last, then the optimizer step."""
    for section in reversed(graph.order):
        ranks = replica_ranks(section)
        if rank in ranks:
            yield Instruction("REDUCE", section.name, replica=ranks.index(rank))
    yield Instruction("STEP")
