"""Writes the programs of all ranks from one global order of tasks: where sends, receives and reductions go.

A SEND stands directly after the task that produces its data. Receives on a channel (an edge, a direction and
a pair of ranks) stand in the order of the sends, because not every backend can match messages out of order.
So before a task, its rank receives what the task needs and whatever was sent earlier on the same channels;
that was sent even earlier, so nothing waits longer for it. A task stands in the programs of all ranks of its
replica, and each of them sends and receives its own slices of the messages. Gradients are reduced after the
last backward of the rank, with sections in one order on all ranks, so no other rank waits for a rank that
waits in a reduction.

All instructions of a step are *entries*: integer columns (`program_table`), the rank that runs them and their
position in its program. A single sort of them yields the programs; a Python loop over tens of thousands of
instructions would take as long as the scheduling itself.
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

# The slots of a task in a program, in this order: receives, one or two computations, sends.
SLOT_RECEIVE, SLOT_FIRST, SLOT_SECOND, SLOT_SEND = range(4)
SLOTS_PER_TASK = 4


class ProgramEntries(NamedTuple):
    """Instructions: `fields` of `InstructionColumns`, each one number for all instructions or a tensor; the
    rank that runs each one; and its position, `place * SLOTS_PER_TASK + slot`, with the place of its task in
    the global order.
    """

    fields: Sequence[int | Tensor]
    rank: Tensor
    position: Tensor


def emit_programs(
    plan: Plan,
    graph: SectionGraph,
    tables: dict[str, MicroBatchTable],
    messages: MessagePairs,
    task_ranges: Mapping[str, TaskRanges],
    order: Sequence[int],
) -> Schedule:
    """Returns the schedule in which ranks run their tasks in the global `order`."""
    place = torch.empty(len(order), dtype=torch.int64)
    place[int_tensor(order)] = torch.arange(len(order))
    emitter = _ProgramEmitter(plan, InstructionNames.from_plan(plan), tables, task_ranges, place)
    programs = _assemble_programs(
        emitter.names,
        [*emitter.emit_computations(), *emitter.emit_messages(messages), *emitter.emit_closing(graph)],
        plan.world_size,
    )
    whole = {name: t.whole_backwards for name, t in tables.items() if t.whole_backwards}
    return Schedule({name: t.micro_batches for name, t in tables.items()}, programs, whole_backwards=whole)


def _assemble_programs(
    names: InstructionNames, entries: Sequence[ProgramEntries], world_size: int
) -> ProgramTable:
    """Sorts the entries by rank and position into programs."""
    rank, position = (
        torch.cat(columns)
        for columns in zip(*((entry.rank, entry.position) for entry in entries), strict=True)
    )
    sorted_rows = torch.argsort(rank * (int(position.max()) + 1) + position, stable=True)
    columns = (
        torch.cat(list(map(_expand_field, field, entries)))
        for field in zip(*(entry.fields for entry in entries), strict=True)
    )
    rows = InstructionColumns._make([*(column[sorted_rows] for column in columns), rank[sorted_rows]])
    return ProgramTable(names, rows, torch.bincount(rank, minlength=world_size).cumsum(0))


def _expand_field(field: int | Tensor, entries: ProgramEntries) -> Tensor:
    return field if isinstance(field, Tensor) else torch.full_like(entries.rank, field)


class _MessageColumns(NamedTuple):
    """The message slices of an edge in one direction. `produced_at` and `needed_at` are the places of the
    tasks that produce and consume them; the other columns are those of the instructions.
    """

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
    """Emits the entries of a step; `task_place[t]` is the place of task t in the global order."""

    plan: Plan
    names: InstructionNames
    tables: Mapping[str, MicroBatchTable]
    task_ranges: Mapping[str, TaskRanges]
    task_place: Tensor

    # -- messages

    def emit_messages(self, pairs: MessagePairs) -> Iterator[ProgramEntries]:
        """Yields receives before the first task that needs them or a later message of their channel, and
        sends after the task that produces them.
        """
        columns = list(self.list_message_columns(pairs))
        if not columns:
            return
        messages, world = _MessageColumns(*map(torch.cat, zip(*columns, strict=True))), self.plan.world_size
        # The order in which all messages are sent: by producing task, then by consuming task.
        sent = torch.argsort(messages.produced_at * len(self.task_place) + messages.needed_at, stable=True)
        messages = _MessageColumns(*(column[sent] for column in messages))
        channel = (
            ((messages.edge * 2 + messages.direction) * world + messages.sender) * world + messages.receiver
        ) * world + messages.part
        due = _receive_places(channel, messages.needed_at, len(self.task_place))
        message_fields = (messages.src, messages.dst, messages.part, messages.parts)
        for kind, rank, peer, position in (
            (KIND_RECEIVE, messages.receiver, messages.sender, due * SLOTS_PER_TASK + SLOT_RECEIVE),
            (
                KIND_SEND,
                messages.sender,
                messages.receiver,
                messages.produced_at * SLOTS_PER_TASK + SLOT_SEND,
            ),
        ):
            yield ProgramEntries(
                (kind, NO_NAME, 0, 0, -1, messages.edge, messages.direction, peer, *message_fields),
                rank,
                position,
            )

    def list_message_columns(self, messages: MessagePairs) -> Iterator[_MessageColumns]:
        """Yields the message slices of each edge, backward and forward."""
        sections, place = {s.name: s for s in self.plan.sections}, self.task_place
        replica = {
            name: int_tensor([m.replica for m in table.micro_batches]) for name, table in self.tables.items()
        }
        for i, edge in sorted(enumerate(self.plan.edges), key=lambda x: x[1].name):
            src, dst = self.task_ranges[edge.src], self.task_ranges[edge.dst]
            if not (pairs := messages[edge.name]):
                continue
            src_micro, dst_micro = map(int_tensor, zip(*pairs, strict=True))
            micros = src_micro, dst_micro
            a, b = replica[edge.src][src_micro], replica[edge.dst][dst_micro]
            if returns_gradient(edge, sections):
                places = (place[dst.backward_start + dst_micro], place[src.backward_start + src_micro])
                yield _build_message_columns((i, 1), (dst, src), (b, a), places, micros)
            places = (place[src.forward_start + src_micro], place[dst.forward_start + dst_micro])
            yield _build_message_columns((i, 0), (src, dst), (a, b), places, micros)

    # -- computations

    def emit_computations(self) -> Iterator[ProgramEntries]:
        """Yields one instruction for each task, or F and B for a task that is both, on all ranks of its
        replica.
        """
        for name, task_ranges in self.task_ranges.items():
            replica = int_tensor([m.replica for m in self.tables[name].micro_batches])
            # For the first rank of each replica, then the second and so on: the rank of each micro-batch.
            ranks = [
                int_tensor(nth)[replica] for nth in zip(*ranks_by_replica(task_ranges.section), strict=True)
            ]
            for kind, start in zip(
                COMPUTE_KINDS,
                (task_ranges.forward_start, task_ranges.backward_start, task_ranges.weight_start),
                strict=True,
            ):
                if start >= 0:
                    slot = SLOT_SECOND if kind == "B" and start == task_ranges.forward_start else SLOT_FIRST
                    position = self.task_place[start : start + task_ranges.count] * SLOTS_PER_TASK + slot
                    micro = torch.arange(task_ranges.count)
                    fields = (
                        INSTRUCTION_KINDS.index(kind),
                        self.names.sections.index(name),
                        replica,
                        task_ranges.section.stage,
                        micro,
                        *NO_MESSAGE_FIELDS,
                    )
                    for rank in ranks:
                        yield ProgramEntries(fields, rank, position)

    def emit_closing(self, graph: SectionGraph) -> Iterator[ProgramEntries]:
        """Yields the reductions, from the last section to the first, which ends its backwards last, and the
        optimizer step.
        """
        last = len(self.task_place) * SLOTS_PER_TASK
        for position, section in enumerate(reversed(graph.topological_order), last):
            rank = torch.tensor(ranks_by_replica(section), dtype=torch.int64)
            replica = torch.arange(len(rank))[:, None].expand_as(rank).flatten()
            fields = (
                KIND_REDUCE,
                self.names.sections.index(section.name),
                replica,
                0,
                -1,
                *NO_MESSAGE_FIELDS,
            )
            yield ProgramEntries(fields, rank.flatten(), torch.full_like(replica, position))
        ranks = torch.arange(self.plan.world_size)
        yield ProgramEntries(
            (KIND_STEP, NO_NAME, 0, 0, -1, *NO_MESSAGE_FIELDS),
            ranks,
            torch.full_like(ranks, last + len(graph.topological_order)),
        )


NO_MESSAGE_FIELDS = (NO_NAME, NO_NAME, -1, -1, -1, 0, 1)  # message fields of other instructions


def _receive_places(channel: Tensor, needed_at: Tensor, places: int) -> Tensor:
    """Returns the place of each message's RECV: the least place of the tasks that need it or a later message
    of its channel.

    Messages are in the order in which they are sent.
    """
    by_channel = torch.argsort(channel, stable=True)
    channels = channel[by_channel]
    # The k-th channel is shifted by k * places, so one minimum from the back over all messages stays within
    # each channel: everything of a later channel is larger.
    is_first = torch.cat([channels[:1] * 0, (channels[1:] != channels[:-1]).long()])
    shift = is_first.cumsum(0) * places
    received = torch.empty_like(needed_at)
    received[by_channel] = torch.cummin((needed_at[by_channel] + shift).flip(0), 0).values.flip(0) - shift
    return received


def _build_message_columns(
    name: tuple[int, int],
    ends: tuple[TaskRanges, TaskRanges],
    replica: TensorPair,
    places: TensorPair,
    micros: TensorPair,
) -> _MessageColumns:
    """Returns the message slices between pairs of replicas; none between replicas that share all target
    ranks.

    `name` is (edge, direction); `ends`, `replica` and `places` are (source, target), `micros` (producer,
    consumer).
    """
    sources, targets = (ranks_by_replica(task_ranges.section) for task_ranges in ends)
    if all(
        task_ranges.section.mesh.replica_size == 1 for task_ranges in ends
    ):  # the common case: `route_message`, column by column
        sender, receiver = (
            int_tensor([rank for (rank,) in ranks])[r]
            for ranks, r in zip((sources, targets), replica, strict=True)
        )
        pair_index = (sender != receiver).nonzero()[:, 0]
        columns = [
            sender[pair_index],
            receiver[pair_index],
            torch.zeros_like(pair_index),
            torch.ones_like(pair_index),
        ]
    else:
        pairs = zip(*(r.tolist() for r in replica), strict=True)
        slices = [
            (i, *piece) for i, (a, b) in enumerate(pairs) for piece in route_message(sources[a], targets[b])
        ]
        pair_index, *columns = (
            map(int_tensor, zip(*slices, strict=True)) if slices else (int_tensor(()) for _ in range(5))
        )
    sender, receiver, slice_index, slice_count = columns
    edge, direction = (torch.full_like(pair_index, number) for number in name)
    (produced_at, needed_at), (src, dst) = (
        [column[pair_index] for column in pair] for pair in (places, micros)
    )
    return _MessageColumns(
        edge, direction, sender, receiver, produced_at, needed_at, src, dst, slice_index, slice_count
    )
