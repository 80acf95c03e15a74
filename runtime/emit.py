"""The programs of all ranks, from one global order of forwards and backwards: where sends, receives and reductions go.

A SEND stands directly after the job that made its data. Receives on a channel (an edge, a direction and a pair of ranks) stand in
the order of the sends, because not every backend can match messages out of order; so before a job its rank receives what it needs
and what was sent before that on the same channel. Those were sent even earlier, so nothing waits longer for it. A job stands in the
programs of all ranks of its replica; each of them sends and receives its own parts of the messages. Gradients are
reduced after the last backward of the rank, sections in one order on all ranks: a rank that waits in a reduction then owes nobody
anything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, repeat
from operator import itemgetter
from typing import cast

from secc.runtime.compose import Table
from secc.runtime.graph import Graph
from secc.runtime.jobs import Messages, Numbers, Step
from secc.runtime.plan import Plan
from secc.runtime.program import COMPUTE, Instruction, Schedule, returns_gradient
from secc.runtime.routes import Ranks, replicas, routes

_instruction = cast("Callable[[tuple[int, Instruction]], Instruction]", itemgetter(1))
_made = cast("Callable[[tuple[object, ...]], Instruction]", partial(tuple.__new__, Instruction))  # a third of `_make`'s time


Channel = tuple[str, str, int, int]  # edge, direction, sender, receiver
Message = tuple[int, int, int, int, int, int]  # places of the jobs that make and use it, micro-batches of the edge's ends, part and parts


def emit(plan: Plan, graph: Graph, tables: dict[str, Table], messages: Messages, step: Step, order: Sequence[int]) -> Schedule:
    """The schedule whose ranks run their jobs in this order."""
    count, square = len(order), len(order) ** 2
    place = [0] * count
    for index, job in enumerate(order):
        place[job] = index
    where = _where(step)
    entries: list[list[tuple[int, Instruction]]] = [[] for _ in range(plan.world_size)]  # to be sorted: by place in `order`, receives first
    for (edge, direction, a, b), channel in _channels(plan, step, messages, where, place).items():
        channel.sort()
        sender, receiver = entries[a].append, entries[b].append
        dues = list(accumulate((m[1] for m in reversed(channel)), min))  # a receive stands before all that need it or a later one
        for due, (source, target, *which) in zip(reversed(dues), channel, strict=True):
            sender((((3 * source + 2) * count + target) * count, _made(("SEND", "", 0, 0, -1, edge, direction, b, *which))))
            receiver(((3 * due * count + source) * count + target, _made(("RECV", "", 0, 0, -1, edge, direction, a, *which))))
    for first, second, some in _computations(tables, step):
        for job, instruction in enumerate(some, first):
            for rank in where[job]:
                entries[rank].append(((3 * place[job] + 1) * square + second, instruction))
    members = [(s.name, {rank: r for r, ranks in enumerate(replicas(s)) for rank in ranks}) for s in reversed(graph.order)]
    programs = ((*map(_instruction, sorted(found)), *_closing(members, rank)) for rank, found in enumerate(entries))
    return Schedule({name: t.micro_batches for name, t in tables.items()}, tuple(programs))


def _where(step: Step) -> list[Ranks]:
    """The ranks that execute each job: those of the replica whose first rank is the job's."""
    found: list[Ranks] = [()] * len(step.jobs.rank)
    for n in step.numbers.values():
        together = {ranks[0]: ranks for ranks in replicas(n.section)}
        for start in {n.forward, n.backward, n.weight} - {-1}:
            found[start : start + n.count] = [together[r] for r in step.jobs.rank[start : start + n.count]]
    return found


def _channels(
    plan: Plan, step: Step, messages: Messages, where: Sequence[Ranks], place: Sequence[int]
) -> defaultdict[Channel, list[Message]]:
    """Every part of a message between different ranks, by channel."""
    sections = {s.name: s for s in plan.sections}
    channels: defaultdict[Channel, list[Message]] = defaultdict(list)
    for edge in plan.edges:
        src, dst, gradient = step.numbers[edge.src], step.numbers[edge.dst], returns_gradient(edge, sections)
        for m, n in messages[edge.name]:
            a, b = where[src.forward + m], where[dst.forward + n]
            for sender, receiver, index, count in routes(a, b):
                channels[edge.name, "fwd", sender, receiver].append((place[src.forward + m], place[dst.forward + n], m, n, index, count))
            for sender, receiver, index, count in routes(b, a) if gradient else ():
                channels[edge.name, "bwd", sender, receiver].append((place[dst.backward + n], place[src.backward + m], m, n, index, count))
    return channels


def _computations(tables: dict[str, Table], step: Step) -> Iterator[tuple[int, bool, Iterator[Instruction]]]:
    """For each kind of computation of a section: its first job, whether its jobs do another one before it, and its instructions."""
    for name, n in step.numbers.items():
        replica = [m.replica for m in tables[name].micro_batches]
        for kind, start in zip(COMPUTE, (n.forward, n.backward, n.weight), strict=True):
            if start >= 0:
                yield start, kind != "F" and start == n.forward, _instructions(kind, n, replica)


def _instructions(kind: str, n: Numbers, replica: Sequence[int]) -> Iterator[Instruction]:
    """One instruction for each of a section's micro-batches; made column by column, because there are thousands."""
    name, stage = n.section.name, n.section.stage
    rest = map(repeat, ("", "", -1, -1, -1, 0, 1))
    return map(_made, zip(repeat(kind), repeat(name), replica, repeat(stage), range(n.count), *rest))


def _closing(replicas: list[tuple[str, dict[int, int]]], rank: int) -> Iterator[Instruction]:
    """Reductions from the last section to the first, whose backwards end last, then the optimizer step."""
    for name, of_rank in replicas:
        if rank in of_rank:
            yield Instruction("REDUCE", name, of_rank[rank])
    yield Instruction("STEP")
