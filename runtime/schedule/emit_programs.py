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

from secc.runtime.plan.int_columns import int_tensor
from secc.runtime.plan.program_table import (
    INSTRUCTION_KINDS,
    KIND_RECEIVE,
    KIND_REDUCE,
    KIND_SEND,
    KIND_STEP,
    NO_NAME,
    InstructionColumns,
    InstructionNames,
    ProgramTable,
)
from secc.runtime.plan.replica_routes import ranks_by_replica, route_message
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import COMPUTE_KINDS, Schedule, returns_gradient
from secc.runtime.schedule.micro_batches import MicroBatchTable
from secc.runtime.schedule.task_graph import MessagePairs, TaskRanges

SLOT_RECEIVE, SLOT_FIRST, SLOT_SECOND, SLOT_SEND = range(
    4
)  # what stands around a job, in this order; a job is one computation or two
SLOTS_PER_TASK = 4


class ProgramEntries(NamedTuple):
    """Instructions: their fields (as `Rows` has them), each a number for all or one for each; the ranks in
    whose programs they stand, and where: at which place in the order, `place * TURNS + turn`."""

    fields: Sequence[int | Tensor]
    rank: Tensor
    position: Tensor


def emit_programs(
    plan: Plan,
    graph: SectionGraph,
    tables: dict[str, MicroBatchTable],
    messages: MessagePairs,
    numbers: Mapping[str, TaskRanges],
    order: Sequence[int],
) -> Schedule:
    """The schedule whose ranks run their jobs in this order."""
    place = torch.empty(len(order), dtype=torch.int64)
    place[int_tensor(order)] = torch.arange(len(order))
    made = _ProgramEmitter(plan, InstructionNames.from_plan(plan), tables, numbers, place)
    programs = _assemble_programs(
        made.names,
        [*made.emit_computations(), *made.emit_messages(messages), *made.emit_closing(graph)],
        plan.world_size,
    )
    return Schedule({name: t.micro_batches for name, t in tables.items()}, programs)


def _assemble_programs(
    names: InstructionNames, entries: Sequence[ProgramEntries], world: int
) -> ProgramTable:
    """The programs of these instructions."""
    rank, where = (
        torch.cat(columns) for columns in zip(*((e.rank, e.position) for e in entries), strict=True)
    )
    at = torch.argsort(rank * (int(where.max()) + 1) + where, stable=True)
    columns = (
        torch.cat(list(map(_expand_field, field, entries)))
        for field in zip(*(e.fields for e in entries), strict=True)
    )
    rows = InstructionColumns._make([*(column[at] for column in columns), rank[at]])
    return ProgramTable(names, rows, torch.bincount(rank, minlength=world).cumsum(0))


def _expand_field(field: int | Tensor, entries: ProgramEntries) -> Tensor:
    return field if isinstance(field, Tensor) else torch.full_like(entries.rank, field)


class _MessageColumns(NamedTuple):
    """The messages of an edge in one direction, in parts: the ranks and the places of the jobs at both ends,
    and what else they say."""

    edge: Tensor
    direction: Tensor
    sender: Tensor
    receiver: Tensor
    produced_at: Tensor
    needed_at: Tensor
    src: Tensor
    dst: Tensor
    part: Tensor
    parts: Tensor


TensorPair = tuple[Tensor, Tensor]


class _ProgramEmitter(NamedTuple):
    """A step of which the programs are made; `place` is where each job stands in the order."""

    plan: Plan
    names: InstructionNames
    tables: Mapping[str, MicroBatchTable]
    task_ranges: Mapping[str, TaskRanges]
    task_place: Tensor

    # -- messages
    # -----------------------------------------------------------------------------------------------------------------

    def emit_messages(self, pairs: MessagePairs) -> Iterator[ProgramEntries]:
        """What ranks send after each job, and receive before the first job that needs it or a later message
        of its channel."""
        ways = list(self.list_message_columns(pairs))
        if not ways:
            return
        found, world = _MessageColumns(*map(torch.cat, zip(*ways, strict=True))), self.plan.world_size
        sent = torch.argsort(
            found.produced_at * len(self.task_place) + found.needed_at, stable=True
        )  # the order in which all messages are sent
        found = _MessageColumns(*(column[sent] for column in found))
        channel = (
            ((found.edge * 2 + found.direction) * world + found.sender) * world + found.receiver
        ) * world + found.part
        due = _receive_places(channel, found.needed_at, len(self.task_place))
        says = (found.src, found.dst, found.part, found.parts)
        for kind, at, peer, where in (
            (KIND_RECEIVE, found.receiver, found.sender, due * SLOTS_PER_TASK + SLOT_RECEIVE),
            (KIND_SEND, found.sender, found.receiver, found.produced_at * SLOTS_PER_TASK + SLOT_SEND),
        ):
            yield ProgramEntries(
                (kind, NO_NAME, 0, 0, -1, found.edge, found.direction, peer, *says), at, where
            )

    def list_message_columns(self, messages: MessagePairs) -> Iterator[_MessageColumns]:
        """The messages that travel on each edge, forward and back."""
        sections, place = {s.name: s for s in self.plan.sections}, self.task_place
        replica = {
            name: int_tensor([m.replica for m in table.micro_batches]) for name, table in self.tables.items()
        }
        for i, edge in sorted(enumerate(self.plan.edges), key=lambda x: x[1].name):
            src, dst = self.task_ranges[edge.src], self.task_ranges[edge.dst]
            if not (pairs := messages[edge.name]):
                continue
            m, n = map(int_tensor, zip(*pairs, strict=True))
            a, b = replica[edge.src][m], replica[edge.dst][n]
            if returns_gradient(edge, sections):
                yield _build_message_columns(
                    (i, 1),
                    (dst, src),
                    (b, a),
                    (place[dst.backward_start + n], place[src.backward_start + m]),
                    (m, n),
                )
            yield _build_message_columns(
                (i, 0),
                (src, dst),
                (a, b),
                (place[src.forward_start + m], place[dst.forward_start + n]),
                (m, n),
            )

    # -- computations
    # -------------------------------------------------------------------------------------------------------------

    def emit_computations(self) -> Iterator[ProgramEntries]:
        """The instructions of all jobs: one for each, or two where it is a forward and a backward; on all
        ranks of a replica."""
        for name, n in self.task_ranges.items():
            replica = int_tensor([m.replica for m in self.tables[name].micro_batches])
            each = zip(
                *ranks_by_replica(n.section), strict=True
            )  # the first rank of each replica, then the second, and so on
            ranks = [int_tensor(some)[replica] for some in each]
            for kind, start in zip(
                COMPUTE_KINDS, (n.forward_start, n.backward_start, n.weight_start), strict=True
            ):
                if start >= 0:
                    turn = SLOT_SECOND if kind == "B" and start == n.forward_start else SLOT_FIRST
                    where = self.task_place[start : start + n.count] * SLOTS_PER_TASK + turn
                    micro = torch.arange(n.count)
                    fields = (
                        INSTRUCTION_KINDS.index(kind),
                        self.names.sections.index(name),
                        replica,
                        n.section.stage,
                        micro,
                        *NO_MESSAGE_FIELDS,
                    )
                    for rank in ranks:
                        yield ProgramEntries(fields, rank, where)

    def emit_closing(self, graph: SectionGraph) -> Iterator[ProgramEntries]:
        """Reductions from the last section to the first, whose backwards end last, then the optimizer
        step."""
        last = len(self.task_place) * SLOTS_PER_TASK
        for where, s in enumerate(reversed(graph.topological_order), last):
            rank = torch.tensor(ranks_by_replica(s), dtype=torch.int64)
            replica = torch.arange(len(rank))[:, None].expand_as(rank).flatten()
            fields = (KIND_REDUCE, self.names.sections.index(s.name), replica, 0, -1, *NO_MESSAGE_FIELDS)
            yield ProgramEntries(fields, rank.flatten(), torch.full_like(replica, where))
        ranks = torch.arange(self.plan.world_size)
        yield ProgramEntries(
            (KIND_STEP, NO_NAME, 0, 0, -1, *NO_MESSAGE_FIELDS),
            ranks,
            torch.full_like(ranks, last + len(graph.topological_order)),
        )


NO_MESSAGE_FIELDS = (NO_NAME, NO_NAME, -1, -1, -1, 0, 1)  # what the fields of messages hold elsewhere


def _receive_places(channel: Tensor, used: Tensor, places: int) -> Tensor:
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


def _build_message_columns(
    name: tuple[int, int],
    ends: tuple[TaskRanges, TaskRanges],
    replica: TensorPair,
    places: TensorPair,
    micros: TensorPair,
) -> _MessageColumns:
    """Messages between these replicas, without those for which nothing travels."""
    sources, targets = (ranks_by_replica(n.section) for n in ends)
    if all(n.section.mesh.tp == 1 for n in ends):  # by far the most: as `routes` has it, column by column
        sender, receiver = (
            int_tensor([rank for (rank,) in ranks])[r]
            for ranks, r in zip((sources, targets), replica, strict=True)
        )
        at = (sender != receiver).nonzero()[:, 0]
        columns = [sender[at], receiver[at], torch.zeros_like(at), torch.ones_like(at)]
    else:
        pairs = zip(*(r.tolist() for r in replica), strict=True)
        found = [
            (i, *part) for i, (a, b) in enumerate(pairs) for part in route_message(sources[a], targets[b])
        ]
        at, *columns = (
            map(int_tensor, zip(*found, strict=True)) if found else (int_tensor(()) for _ in range(5))
        )
    sender, receiver, part, parts = columns
    edge, direction = (torch.full_like(at, number) for number in name)
    (made, used), (src, dst) = ([column[at] for column in two] for two in (places, micros))
    return _MessageColumns(edge, direction, sender, receiver, made, used, src, dst, part, parts)
