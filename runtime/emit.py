"""The programs of all ranks, from one global order of forwards and backwards: where sends, receives and reductions go.

A SEND stands directly after the job that made its data. Receives on a channel (an edge, a direction and a pair of ranks) stand in
the order of the sends, because not every backend can match messages out of order; so before a job its rank receives what it needs
and what was sent before that on the same channel. Those were sent even earlier, so nothing waits longer for it. A job stands in the
programs of all ranks of its replica; each of them sends and receives its own parts of the messages. Gradients are
reduced after the last backward of the rank, sections in one order on all ranks: a rank that waits in a reduction then owes nobody
anything.

All instructions of a step are *entries*, columns of numbers that say on which rank and where each stands; one sort of them makes the
programs. There are tens of thousands, and a loop over them would take as long as the order itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import NamedTuple, cast

import torch
from torch import Tensor

from secc.runtime.columns import integers
from secc.runtime.compose import Column, Table
from secc.runtime.graph import Graph
from secc.runtime.jobs import Messages, Numbers
from secc.runtime.plan import Plan
from secc.runtime.program import COMPUTE, Instruction, Schedule, returns_gradient
from secc.runtime.routes import replicas, routes

_made = cast("Callable[[tuple[object, ...]], Instruction]", partial(tuple.__new__, Instruction))  # a third of `_make`'s time

RECEIVE, FIRST, SECOND, SEND = range(4)  # what stands around a job, in this order; a job is one computation or two
TURNS = 4


class Entries(NamedTuple):
    """Instructions, the ranks in whose programs they stand, and where: at which place in the order, `place * TURNS + turn`."""

    instructions: list[Instruction]
    rank: Tensor
    where: Tensor


def emit(
    plan: Plan, graph: Graph, tables: dict[str, Table], messages: Messages, numbers: Mapping[str, Numbers], order: Sequence[int]
) -> Schedule:
    """The schedule whose ranks run their jobs in this order."""
    place = torch.empty(len(order), dtype=torch.int64)
    place[integers(order)] = torch.arange(len(order))
    entries = [*_computations(tables, numbers, place), *_messages(plan, tables, messages, numbers, place)]
    rank, where = (torch.cat(columns) for columns in zip(*((e.rank, e.where) for e in entries), strict=True))
    instructions = list(chain.from_iterable(e.instructions for e in entries))
    arranged = map(instructions.__getitem__, torch.argsort(rank * (TURNS * len(order)) + where, stable=True).tolist())
    members = [(s.name, {rank: r for r, ranks in enumerate(replicas(s)) for rank in ranks}) for s in reversed(graph.order)]
    counts = torch.bincount(rank, minlength=plan.world_size).tolist()
    programs = tuple((*islice(arranged, count), *_closing(members, r)) for r, count in enumerate(counts))
    return Schedule({name: t.micro_batches for name, t in tables.items()}, programs)


# -- messages ---------------------------------------------------------------------------------------------------------------------


class _Way(NamedTuple):
    """The messages of an edge in one direction, in parts: the ranks and the places of the jobs at both ends, and what else they say."""

    name: tuple[str, str]  # edge, direction
    sender: Column
    receiver: Column
    made: Tensor
    used: Tensor
    micros: tuple[Sequence[int], Sequence[int]]
    parts: tuple[Sequence[int], Sequence[int]]  # index, and of how many

    def instructions(self, kind: str, peer: Sequence[int]) -> Iterator[Instruction]:
        """One for each message, made column by column."""
        edge, direction = map(repeat, self.name)
        return map(_made, zip(repeat(kind), repeat(""), repeat(0), repeat(0), repeat(-1), edge, direction, peer, *self.micros, *self.parts))


def _messages(plan: Plan, tables: dict[str, Table], messages: Messages, numbers: Mapping[str, Numbers], place: Tensor) -> Iterator[Entries]:
    """What ranks send after each job, and receive before the first job that needs it or a later message of its channel."""
    ways = list(_ways(plan, tables, messages, numbers, place))
    if not ways:
        return
    made, used = (torch.cat(columns) for columns in zip(*((w.made, w.used) for w in ways), strict=True))
    sender, receiver, part = (
        integers([*chain.from_iterable(x)]) for x in ((w.sender for w in ways), (w.receiver for w in ways), (w.parts[0] for w in ways))
    )
    sent = torch.argsort(made * len(place) + used, stable=True)  # the order in which all messages are sent
    way = torch.arange(len(ways)).repeat_interleave(integers([len(w.sender) for w in ways]))
    channel = ((way * plan.world_size + sender) * plan.world_size + receiver) * plan.world_size + part
    due = _dues(channel[sent], used[sent], len(place))
    sends = list(chain.from_iterable(w.instructions("SEND", w.receiver) for w in ways))
    receives = list(chain.from_iterable(w.instructions("RECV", w.sender) for w in ways))
    at = sent.tolist()
    yield Entries(list(map(receives.__getitem__, at)), receiver[sent], due * TURNS + RECEIVE)
    yield Entries(list(map(sends.__getitem__, at)), sender[sent], made[sent] * TURNS + SEND)


def _dues(channel: Tensor, used: Tensor, places: int) -> Tensor:
    """Where each message is received: the least place of the jobs that use it or a later one of its channel."""
    by_channel = torch.argsort(channel, stable=True)
    ordered = channel[by_channel]
    step = torch.cat([ordered[:1] * 0, (ordered[1:] != ordered[:-1]).long()]).cumsum(0) * places  # keeps channels apart
    found = torch.empty_like(used)
    found[by_channel] = torch.cummin((used[by_channel] + step).flip(0), 0).values.flip(0) - step
    return found


def _ways(plan: Plan, tables: dict[str, Table], messages: Messages, numbers: Mapping[str, Numbers], place: Tensor) -> Iterator[_Way]:
    sections = {s.name: s for s in plan.sections}
    replica = {name: integers([m.replica for m in table.micro_batches]) for name, table in tables.items()}
    for edge in sorted(plan.edges, key=lambda e: e.name):
        src, dst = numbers[edge.src], numbers[edge.dst]
        if not (pairs := messages[edge.name]):
            continue
        m, n = map(integers, zip(*pairs, strict=True))
        a, b = replica[edge.src][m], replica[edge.dst][n]
        if returns_gradient(edge, sections):
            yield _way((edge.name, "bwd"), (dst, src), (b, a), (place[dst.backward + n], place[src.backward + m]), (m, n))
        yield _way((edge.name, "fwd"), (src, dst), (a, b), (place[src.forward + m], place[dst.forward + n]), (m, n))


Two = tuple[Tensor, Tensor]


def _way(name: tuple[str, str], ends: tuple[Numbers, Numbers], replica: Two, places: Two, micros: Two) -> _Way:
    """Messages between these replicas, without those for which nothing travels."""
    sources, targets = (replicas(n.section) for n in ends)
    if all(n.section.mesh.tp == 1 for n in ends):  # by far the most: as `routes` has it, column by column
        sender, receiver = (integers([rank for (rank,) in ranks])[r] for ranks, r in zip((sources, targets), replica, strict=True))
        at = (sender != receiver).nonzero()[:, 0]
        columns = sender[at].tolist(), receiver[at].tolist(), [0] * len(at), [1] * len(at)
    else:
        pairs = zip(*(r.tolist() for r in replica), strict=True)
        found = [(i, *part) for i, (a, b) in enumerate(pairs) for part in routes(sources[a], targets[b])]
        index, *columns = map(list, zip(*found, strict=True)) if found else ([] for _ in range(5))
        at = integers(index)
    sender, receiver, part, parts = columns
    made, used = (p[at] for p in places)
    return _Way(name, sender, receiver, made, used, (micros[0][at].tolist(), micros[1][at].tolist()), (part, parts))


# -- computations -----------------------------------------------------------------------------------------------------------------


def _computations(tables: dict[str, Table], numbers: Mapping[str, Numbers], place: Tensor) -> Iterator[Entries]:
    """The instructions of all jobs: one for each, or two where it is a forward and a backward; on all ranks of a replica."""
    for name, n in numbers.items():
        replica = [m.replica for m in tables[name].micro_batches]
        each = zip(*replicas(n.section), strict=True)  # the first rank of each replica, then the second, and so on
        ranks = [integers(some)[integers(replica)] for some in each]
        for kind, start in zip(COMPUTE, (n.forward, n.backward, n.weight), strict=True):
            if start >= 0:
                turn = SECOND if kind == "B" and start == n.forward else FIRST
                where = place[start : start + n.count] * TURNS + turn
                made = list(_instructions(kind, n, replica))
                for rank in ranks:
                    yield Entries(made, rank, where)


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
