"""The programs of all ranks, from one global order of forwards and backwards: where sends, receives and
reductions go.

A SEND stands directly after the job that made its data. Receives on a channel (an edge, a direction and a
pair of ranks) stand in the order of the sends, because not every backend can match messages out of order; so
before a job its rank receives what it needs and what was sent before that on the same channel. Those were
sent even earlier, so nothing waits longer for it. A job stands in the programs of all ranks of its replica;
each of them sends and receives its own parts of the messages. Gradients are reduced after the last backward
of the rank, sections in one order on all ranks: a rank that waits in a reduction then owes nobody anything.

All instructions of a step are *entries*: columns of numbers (`programs`), the ranks in whose programs they
stand, and where. One sort of them makes the programs. There are tens of thousands, and a loop over them would
take as long as the order itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from secc.runtime.plan.int_columns import integers
from secc.runtime.plan.program_table import BLANK, KINDS, RECEIVE, REDUCE, SEND, STEP, Names, Programs, Rows
from secc.runtime.plan.replica_routes import replicas, routes
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.section_graph import Graph
from secc.runtime.plan.step_program import COMPUTE, Schedule, returns_gradient
from secc.runtime.schedule.micro_batches import Table
from secc.runtime.schedule.task_graph import Messages, Numbers

BEFORE, FIRST, SECOND, AFTER = range(
    4
)  # what stands around a job, in this order; a job is one computation or two
TURNS = 4


class Entries(NamedTuple):
    """Instructions: their fields (as `Rows` has them), each a number for all or one for each; the ranks in
    whose programs they stand, and where: at which place in the order, `place * TURNS + turn`."""

    fields: Sequence[int | Tensor]
    rank: Tensor
    where: Tensor


def emit(
    plan: Plan,
    graph: Graph,
    tables: dict[str, Table],
    messages: Messages,
    numbers: Mapping[str, Numbers],
    order: Sequence[int],
) -> Schedule:
    """The schedule whose ranks run their jobs in this order."""
    place = torch.empty(len(order), dtype=torch.int64)
    place[integers(order)] = torch.arange(len(order))
    made = _Emitter(plan, Names.of(plan), tables, numbers, place)
    programs = _arranged(
        made.names, [*made.computations(), *made.messages(messages), *made.closing(graph)], plan.world_size
    )
    return Schedule({name: t.micro_batches for name, t in tables.items()}, programs)


def _arranged(names: Names, entries: Sequence[Entries], world: int) -> Programs:
    """The programs of these instructions."""
    rank, where = (torch.cat(columns) for columns in zip(*((e.rank, e.where) for e in entries), strict=True))
    at = torch.argsort(rank * (int(where.max()) + 1) + where, stable=True)
    columns = (
        torch.cat(list(map(_column, field, entries)))
        for field in zip(*(e.fields for e in entries), strict=True)
    )
    rows = Rows._make([*(column[at] for column in columns), rank[at]])
    return Programs(names, rows, torch.bincount(rank, minlength=world).cumsum(0))


def _column(field: int | Tensor, entries: Entries) -> Tensor:
    return field if isinstance(field, Tensor) else torch.full_like(entries.rank, field)


class _Way(NamedTuple):
    """The messages of an edge in one direction, in parts: the ranks and the places of the jobs at both ends,
    and what else they say."""

    edge: Tensor
    direction: Tensor
    sender: Tensor
    receiver: Tensor
    made: Tensor
    used: Tensor
    src: Tensor
    dst: Tensor
    part: Tensor
    parts: Tensor


Two = tuple[Tensor, Tensor]


class _Emitter(NamedTuple):
    """A step of which the programs are made; `place` is where each job stands in the order."""

    plan: Plan
    names: Names
    tables: Mapping[str, Table]
    numbers: Mapping[str, Numbers]
    place: Tensor

    # -- messages
    # -----------------------------------------------------------------------------------------------------------------

    def messages(self, pairs: Messages) -> Iterator[Entries]:
        """What ranks send after each job, and receive before the first job that needs it or a later message
        of its channel."""
        ways = list(self.ways(pairs))
        if not ways:
            return
        found, world = _Way(*map(torch.cat, zip(*ways, strict=True))), self.plan.world_size
        sent = torch.argsort(
            found.made * len(self.place) + found.used, stable=True
        )  # the order in which all messages are sent
        found = _Way(*(column[sent] for column in found))
        channel = (
            ((found.edge * 2 + found.direction) * world + found.sender) * world + found.receiver
        ) * world + found.part
        due = _dues(channel, found.used, len(self.place))
        says = (found.src, found.dst, found.part, found.parts)
        for kind, at, peer, where in (
            (RECEIVE, found.receiver, found.sender, due * TURNS + BEFORE),
            (SEND, found.sender, found.receiver, found.made * TURNS + AFTER),
        ):
            yield Entries((kind, BLANK, 0, 0, -1, found.edge, found.direction, peer, *says), at, where)

    def ways(self, messages: Messages) -> Iterator[_Way]:
        """The messages that travel on each edge, forward and back."""
        sections, place = {s.name: s for s in self.plan.sections}, self.place
        replica = {
            name: integers([m.replica for m in table.micro_batches]) for name, table in self.tables.items()
        }
        for i, edge in sorted(enumerate(self.plan.edges), key=lambda x: x[1].name):
            src, dst = self.numbers[edge.src], self.numbers[edge.dst]
            if not (pairs := messages[edge.name]):
                continue
            m, n = map(integers, zip(*pairs, strict=True))
            a, b = replica[edge.src][m], replica[edge.dst][n]
            if returns_gradient(edge, sections):
                yield _way(
                    (i, 1), (dst, src), (b, a), (place[dst.backward + n], place[src.backward + m]), (m, n)
                )
            yield _way((i, 0), (src, dst), (a, b), (place[src.forward + m], place[dst.forward + n]), (m, n))

    # -- computations
    # -------------------------------------------------------------------------------------------------------------

    def computations(self) -> Iterator[Entries]:
        """The instructions of all jobs: one for each, or two where it is a forward and a backward; on all
        ranks of a replica."""
        for name, n in self.numbers.items():
            replica = integers([m.replica for m in self.tables[name].micro_batches])
            each = zip(
                *replicas(n.section), strict=True
            )  # the first rank of each replica, then the second, and so on
            ranks = [integers(some)[replica] for some in each]
            for kind, start in zip(COMPUTE, (n.forward, n.backward, n.weight), strict=True):
                if start >= 0:
                    turn = SECOND if kind == "B" and start == n.forward else FIRST
                    where = self.place[start : start + n.count] * TURNS + turn
                    micro = torch.arange(n.count)
                    fields = (
                        KINDS.index(kind),
                        self.names.sections.index(name),
                        replica,
                        n.section.stage,
                        micro,
                        *NO_MESSAGE,
                    )
                    for rank in ranks:
                        yield Entries(fields, rank, where)

    def closing(self, graph: Graph) -> Iterator[Entries]:
        """Reductions from the last section to the first, whose backwards end last, then the optimizer
        step."""
        last = len(self.place) * TURNS
        for where, s in enumerate(reversed(graph.order), last):
            rank = torch.tensor(replicas(s), dtype=torch.int64)
            replica = torch.arange(len(rank))[:, None].expand_as(rank).flatten()
            fields = (REDUCE, self.names.sections.index(s.name), replica, 0, -1, *NO_MESSAGE)
            yield Entries(fields, rank.flatten(), torch.full_like(replica, where))
        ranks = torch.arange(self.plan.world_size)
        yield Entries(
            (STEP, BLANK, 0, 0, -1, *NO_MESSAGE), ranks, torch.full_like(ranks, last + len(graph.order))
        )


NO_MESSAGE = (BLANK, BLANK, -1, -1, -1, 0, 1)  # what the fields of messages hold elsewhere


def _dues(channel: Tensor, used: Tensor, places: int) -> Tensor:
    """Where each message is received: the least place of the jobs that use it or a later one of its
    channel."""
    by_channel = torch.argsort(channel, stable=True)
    ordered = channel[by_channel]
    step = (
        torch.cat([ordered[:1] * 0, (ordered[1:] != ordered[:-1]).long()]).cumsum(0) * places
    )  # keeps channels apart
    found = torch.empty_like(used)
    found[by_channel] = torch.cummin((used[by_channel] + step).flip(0), 0).values.flip(0) - step
    return found


def _way(
    name: tuple[int, int], ends: tuple[Numbers, Numbers], replica: Two, places: Two, micros: Two
) -> _Way:
    """Messages between these replicas, without those for which nothing travels."""
    sources, targets = (replicas(n.section) for n in ends)
    if all(n.section.mesh.tp == 1 for n in ends):  # by far the most: as `routes` has it, column by column
        sender, receiver = (
            integers([rank for (rank,) in ranks])[r]
            for ranks, r in zip((sources, targets), replica, strict=True)
        )
        at = (sender != receiver).nonzero()[:, 0]
        columns = [sender[at], receiver[at], torch.zeros_like(at), torch.ones_like(at)]
    else:
        pairs = zip(*(r.tolist() for r in replica), strict=True)
        found = [(i, *part) for i, (a, b) in enumerate(pairs) for part in routes(sources[a], targets[b])]
        at, *columns = map(integers, zip(*found, strict=True)) if found else (integers(()) for _ in range(5))
    sender, receiver, part, parts = columns
    edge, direction = (torch.full_like(at, number) for number in name)
    (made, used), (src, dst) = ([column[at] for column in two] for two in (places, micros))
    return _Way(edge, direction, sender, receiver, made, used, src, dst, part, parts)
