"""The programs of all ranks, from one global order of forwards and backwards: where sends, receives and reductions go.

A SEND stands directly after the job that made its data. Receives on a channel (an edge, a direction and a pair of ranks) stand in
the order of the sends, because not every backend can match messages out of order; so before a job its rank receives what it needs
and what was sent before that on the same channel. Those were sent even earlier, so nothing waits longer for it. Gradients are
reduced after the last backward of the rank, sections in one order on all ranks: a rank that waits in a reduction then owes nobody
anything.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from secc.runtime.compose import Table
from secc.runtime.graph import Graph
from secc.runtime.jobs import Messages, Step
from secc.runtime.plan import Edge, Plan
from secc.runtime.program import Instruction, Schedule, replica_ranks, returns_gradient


@dataclass(slots=True, eq=False)
class _Message:
    """A tensor on its way between two jobs on different ranks; `channel` holds those that were sent and not yet received."""

    send: Instruction
    receive: Instruction
    target: int
    channel: deque[_Message]
    received: bool = False


def emit(plan: Plan, graph: Graph, tables: dict[str, Table], messages: Messages, step: Step, order: Sequence[int]) -> Schedule:
    """The schedule whose ranks run their jobs in this order."""
    place = [0] * len(order)
    for index, job in enumerate(order):
        place[job] = index
    outgoing: dict[int, list[_Message]] = defaultdict(list)
    incoming: dict[int, list[_Message]] = defaultdict(list)
    for source, message in _messages(plan, step, messages):
        outgoing[source].append(message)
        incoming[message.target].append(message)
    compute = _compute(tables, step)
    replicas = [(s.name, {rank: r for r, rank in enumerate(replica_ranks(s))}) for s in reversed(graph.order)]
    programs: list[list[Instruction]] = [[] for _ in range(plan.world_size)]
    for job in order:
        program = programs[step.jobs.rank[job]]
        for message in incoming.get(job, ()):
            while not message.received:
                first = message.channel.popleft()
                first.received = True
                program.append(first.receive)
        program += compute[job]
        sent = outgoing.get(job, ())
        for message in sent if len(sent) < 2 else sorted(sent, key=lambda m: place[m.target]):
            program.append(message.send)
            message.channel.append(message)
    for rank, program in enumerate(programs):
        program += _closing(replicas, rank)
    return Schedule({name: t.micro_batches for name, t in tables.items()}, tuple(map(tuple, programs)))


def _messages(plan: Plan, step: Step, messages: Messages) -> Iterator[tuple[int, _Message]]:
    """Every message between different ranks, with the job that makes it."""
    sections, rank = {s.name: s for s in plan.sections}, step.jobs.rank
    channels: dict[tuple[str, str, int, int], deque[_Message]] = defaultdict(deque)
    for edge in plan.edges:
        src, dst, gradient = step.numbers[edge.src], step.numbers[edge.dst], returns_gradient(edge, sections)
        for pair in messages[edge.name]:
            a, b = rank[src.forward + pair[0]], rank[dst.forward + pair[1]]
            if a != b:
                yield src.forward + pair[0], _message(edge, "fwd", pair, a, b, dst.forward + pair[1], channels)
                if gradient:
                    yield dst.backward + pair[1], _message(edge, "bwd", pair, b, a, src.backward + pair[0], channels)


def _message(
    edge: Edge,
    direction: str,
    pair: tuple[int, int],
    a: int,
    b: int,
    target: int,
    channels: dict[tuple[str, str, int, int], deque[_Message]],
) -> _Message:
    """The message from rank `a` to rank `b`."""
    send = Instruction._make(("SEND", "", 0, 0, -1, edge.name, direction, b, *pair))
    receive = Instruction._make(("RECV", "", 0, 0, -1, edge.name, direction, a, *pair))
    return _Message(send, receive, target, channels[edge.name, direction, a, b])


def _compute(tables: dict[str, Table], step: Step) -> list[tuple[Instruction, ...]]:
    """The instructions of each job."""
    found: list[tuple[Instruction, ...]] = [()] * len(step.jobs.rank)
    for name, n in step.numbers.items():
        micros = tables[name].micro_batches
        forwards = [Instruction._make(("F", name, m.replica, n.section.stage, m.index, "", "", -1, -1, -1)) for m in micros]
        backwards = [Instruction._make(("B", *i[1:])) for i in forwards] if n.backward >= 0 else []
        if n.backward == n.forward:
            found[n.forward : n.forward + len(micros)] = zip(forwards, backwards, strict=True)
        else:
            found[n.forward : n.forward + len(micros)] = zip(forwards, strict=True)
            found[n.backward : n.backward + len(backwards)] = zip(backwards, strict=True)
    return found


def _closing(replicas: list[tuple[str, dict[int, int]]], rank: int) -> Iterator[Instruction]:
    """Reductions from the last section to the first, whose backwards end last, then the optimizer step."""
    for name, of_rank in replicas:
        if rank in of_rank:
            yield Instruction("REDUCE", name, of_rank[rank])
    yield Instruction("STEP")
