"""The programs of all ranks, from one global order of forwards and backwards: where sends, receives and reductions go.

A SEND stands directly after the job that made its data. Receives on a channel (an edge, a direction and a pair of ranks) stand in
the order of the sends, because not every backend can match messages out of order; so before a job its rank receives what it needs
and what was sent before that on the same channel. Those were sent even earlier, so nothing waits longer for it. A job stands in the
programs of all ranks of its replica; each of them sends and receives its own parts of the messages. Gradients are
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
from secc.runtime.program import Instruction, Schedule, returns_gradient
from secc.runtime.routes import Part, Ranks, replicas, routes


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
    compute, where = _compute(tables, step), _where(step)
    programs: list[list[Instruction]] = [[] for _ in range(plan.world_size)]
    for job in order:
        for message in incoming.get(job, ()):
            while not message.received:
                first = message.channel.popleft()
                first.received = True
                programs[first.send.peer].append(first.receive)
        for rank in where[job]:
            programs[rank] += compute[job]
        sent = outgoing.get(job, ())
        for message in sent if len(sent) < 2 else sorted(sent, key=lambda m: place[m.target]):
            programs[message.receive.peer].append(message.send)
            message.channel.append(message)
    members = [(s.name, {rank: r for r, ranks in enumerate(replicas(s)) for rank in ranks}) for s in reversed(graph.order)]
    for rank, program in enumerate(programs):
        program += _closing(members, rank)
    return Schedule({name: t.micro_batches for name, t in tables.items()}, tuple(map(tuple, programs)))


def _where(step: Step) -> list[Ranks]:
    """The ranks that execute each job: those of the replica whose first rank is the job's."""
    found: list[Ranks] = [()] * len(step.jobs.rank)
    for n in step.numbers.values():
        together = {ranks[0]: ranks for ranks in replicas(n.section)}
        for start in {n.forward, n.backward, n.weight} - {-1}:
            found[start : start + n.count] = [together[r] for r in step.jobs.rank[start : start + n.count]]
    return found


def _messages(plan: Plan, step: Step, messages: Messages) -> Iterator[tuple[int, _Message]]:
    """Every part of a message between different ranks, with the job that makes it."""
    sections, where = {s.name: s for s in plan.sections}, _where(step)
    channels: dict[tuple[str, str, int, int], deque[_Message]] = defaultdict(deque)
    for edge in plan.edges:
        src, dst, gradient = step.numbers[edge.src], step.numbers[edge.dst], returns_gradient(edge, sections)
        for pair in messages[edge.name]:
            a, b = where[src.forward + pair[0]], where[dst.forward + pair[1]]
            for part in routes(a, b):
                yield src.forward + pair[0], _message(edge, "fwd", pair, part, dst.forward + pair[1], channels)
            for part in routes(b, a) if gradient else ():
                yield dst.backward + pair[1], _message(edge, "bwd", pair, part, src.backward + pair[0], channels)


def _message(
    edge: Edge, direction: str, pair: tuple[int, int], part: Part, target: int, channels: dict[tuple[str, str, int, int], deque[_Message]]
) -> _Message:
    a, b, index, count = part
    send = Instruction._make(("SEND", "", 0, 0, -1, edge.name, direction, b, *pair, index, count))
    receive = Instruction._make(("RECV", "", 0, 0, -1, edge.name, direction, a, *pair, index, count))
    return _Message(send, receive, target, channels[edge.name, direction, a, b])


def _compute(tables: dict[str, Table], step: Step) -> list[tuple[Instruction, ...]]:
    """The instructions of each job."""
    found: list[tuple[Instruction, ...]] = [()] * len(step.jobs.rank)
    for name, n in step.numbers.items():
        micros = tables[name].micro_batches
        forwards = [Instruction._make(("F", name, m.replica, n.section.stage, m.index, "", "", -1, -1, -1, 0, 1)) for m in micros]
        backwards = [Instruction._make(("B", *i[1:])) for i in forwards] if n.backward >= 0 else []
        if n.weight >= 0:
            found[n.weight : n.weight + len(micros)] = zip([Instruction._make(("W", *i[1:])) for i in forwards], strict=True)
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
