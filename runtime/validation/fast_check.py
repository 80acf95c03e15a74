"""Vectorised validity check of a schedule, which every rank makes before every step, so it must take little
time.

A step has tens of thousands of instructions, so they are compared as integer columns. Every instruction must
be one that the micro-batches need, once and on its rank. On each rank, data must be produced before it is
used, and the receives of a channel must be in the order of its sends. Then the programs are run as far as
ranks wait at all: at receives, reductions and computations of several ranks. The schedule is valid if all
programs end. The rules are those of `full_check`, which explains what is wrong when this check fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from secc.runtime.host.gc_control import pause_gc
from secc.runtime.plan.int_columns import int_tensor
from secc.runtime.plan.program_table import (
    INSTRUCTION_KINDS,
    KIND_BACKWARD,
    KIND_FORWARD,
    KIND_RECEIVE,
    KIND_REDUCE,
    KIND_SEND,
    KIND_STEP,
    KIND_WEIGHT,
    NO_NAME,
    InstructionColumns,
    InstructionNames,
    ProgramTable,
)
from secc.runtime.plan.replica_routes import ranks_by_replica, route_message
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Edge, Plan, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import (
    SampleMeta,
    Schedule,
    compute_kinds,
    micro_batch_pairs,
    replicas_in_lockstep,
    returns_gradient,
    runs_in_lockstep,
)
from secc.runtime.schedule.cross_step_prefetch import find_prefetchable_sections
from secc.runtime.validation.progress_check import BlockingPoints, all_ranks_finish, collective_points


class _InvalidSchedule(Exception):
    """Raised inside the check for a schedule that is not valid."""


def is_valid_schedule(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> bool:
    """Returns whether `schedule` is complete, in order and free of deadlock for this global batch."""
    has_right_keys = (
        schedule.micro_batches.keys() == {s.name for s in plan.sections}
        and len(schedule.programs) == plan.world_size
    )
    if not (has_right_keys and _has_all_samples(plan, samples, schedule)):
        return False
    try:
        with pause_gc():
            _FastCheck(plan, schedule).run()
    except _InvalidSchedule:
        return False
    return True


def _require(condition: bool) -> None:
    """Raises _InvalidSchedule unless the condition holds."""
    if not condition:
        raise _InvalidSchedule


def _has_all_samples(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> bool:
    """Returns whether every active sample is in one micro-batch of each section, no other sample is, and
    indices, replicas and sizes of micro-batches are valid.
    """
    patterns = {sample.pattern for sample in samples}
    is_spliced = schedule.own_samples is not None or bool(schedule.prefetched)
    prefetchable = find_prefetchable_sections(plan, SectionGraph(plan)) if is_spliced else []
    for section in plan.sections:
        micros, is_active_for = (
            schedule.micro_batches[section.name],
            {p: is_active(section.when, p) for p in patterns},
        )
        positions = sorted([p for m in micros if not schedule.is_of_next_batch(m) for p in m.samples])
        if positions != [
            p for p, sample in enumerate(samples[: schedule.own_samples]) if is_active_for[sample.pattern]
        ]:
            return False
        if is_spliced and not _prefetches_correctly(samples, schedule, section, prefetchable):
            return False
        for i, m in enumerate(micros):
            if m.index != i or m.section != section.name or not 0 <= m.replica < section.mesh.dp:
                return False
            if not (0 if runs_in_lockstep(section) else 1) <= len(m.samples) <= section.most_samples or (
                len(m.samples) > 1 and any(a >= b for a, b in pairwise(m.samples))
            ):
                return False
        counts, together = Counter(m.replica for m in micros), replicas_in_lockstep(section)
        if together > 1 and any(counts[r] != counts[r - r % together] for r in range(section.mesh.dp)):
            return False
    return True


def _prefetches_correctly(
    samples: Sequence[SampleMeta], schedule: Schedule, section: Section, prefetchable: Sequence[Section]
) -> bool:
    """Returns whether a section crosses steps only if it may prefetch, and computes active samples of the
    next batch once.
    """
    micros = schedule.micro_batches[section.name]
    prefetched = schedule.prefetched.get(section.name, frozenset())
    next_batch = [m for m in micros if schedule.is_of_next_batch(m)]
    positions = [p for m in next_batch for p in m.samples]
    if not positions and not prefetched:
        return True
    are_valid = len(positions) == len(set(positions)) and all(
        p < len(samples) and is_active(section.when, samples[p].pattern) for p in positions
    )
    return section in prefetchable and are_valid and prefetched <= set(range(len(micros) - len(next_batch)))


# -- columns of instructions


_ABSENT = -1  # in tensors of positions, tasks and replicas
_NO_MESSAGE_VALUES = {
    "edge": NO_NAME,
    "direction": NO_NAME,
    "peer": -1,
    "src": -1,
    "dst": -1,
    "part": 0,
    "parts": 1,
}
_NO_COMPUTATION_VALUES = {"section": NO_NAME, "replica": 0, "stage": 0, "micro": -1}


def _columns_equal(rows: InstructionColumns, **values: int) -> bool:
    """Returns whether all rows have these values."""
    return all(bool((getattr(rows, name) == value).all()) for name, value in values.items())


def _is_in_range(column: Tensor, count: int) -> bool:
    """Returns whether all values are from 0 to before `count`."""
    return len(column) == 0 or (int(column.min()) >= 0 and int(column.max()) < count)


class _SectionTasks(NamedTuple):
    """The tasks of a section: computations of a micro-batch on one rank of its replica.

    Those of micro-batch m and kind k are numbered from `starts[k] + m * tp` on, one for each rank of the
    replica.
    """

    starts: dict[int, int]
    ranks: Tensor  # [replica, tp]
    replica: Tensor  # [micro-batch]
    prefetched: Tensor  # [micro-batch], bool: the previous step has computed the forward

    def micro_batch_tasks(self, kind: int, micros: Tensor) -> Tensor:
        """Returns the tasks of micro-batches on all ranks of their replicas: [micro-batch, tp]."""
        tp = self.ranks.shape[1]
        return self.starts[kind] + (micros * tp)[:, None] + torch.arange(tp)


class _LinkColumns(NamedTuple):
    """Data that passes between tasks over an edge: within a rank (`parts` is 0), or as `part` of `parts`
    slices.

    `edge_direction` is twice the edge's index, plus 1 for gradients. Prefetched forwards are _ABSENT.
    """

    edge_direction: Tensor
    src: Tensor
    dst: Tensor
    sender: Tensor
    receiver: Tensor
    part: Tensor
    parts: Tensor
    producer_task: Tensor
    consumer_task: Tensor

    def take_rows(self, indices: Tensor) -> _LinkColumns:
        """Returns the rows at these indices."""
        return _LinkColumns(*(column[indices] for column in self))


# -- the check


class _FastCheck:
    """The check of all programs. `task_place[t]` is the position of task t among the instructions of all
    programs, _ABSENT until it is found.
    """

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.plan, self.schedule, self.world_size = plan, schedule, plan.world_size
        programs = ProgramTable.from_programs(schedule.programs, InstructionNames.from_plan(plan))
        self.columns, self.program_ends = programs.columns, programs.program_ends
        self.section_tasks: dict[str, _SectionTasks] = {}
        self.task_count = 0
        for section in plan.sections:
            micros = schedule.micro_batches[section.name]
            ranks = torch.tensor(ranks_by_replica(section), dtype=torch.int64)
            starts = {
                INSTRUCTION_KINDS.index(kind): self.task_count + k * len(micros) * ranks.shape[1]
                for k, kind in enumerate(compute_kinds(section))
            }
            self.task_count += len(starts) * len(micros) * ranks.shape[1]
            prefetched = torch.zeros(len(micros), dtype=torch.bool)
            prefetched[int_tensor(schedule.prefetched.get(section.name, ()))] = True
            self.section_tasks[section.name] = _SectionTasks(
                starts, ranks, int_tensor(m.replica for m in micros), prefetched
            )
        self.task_place = torch.full((self.task_count,), _ABSENT)

    def run(self) -> None:
        """Raises _InvalidSchedule for a schedule that is not valid."""
        kind = self.columns.kind
        _require(
            bool((kind >= 0).all())
            and torch.equal((kind == KIND_STEP).nonzero()[:, 0], self.program_ends - 1)
        )
        for i, s in enumerate(self.plan.sections):
            self.check_computations(s, (self.columns.section == i) & (kind <= KIND_WEIGHT))
        _require(int((self.task_place >= 0).sum()) == int((kind <= KIND_WEIGHT).sum()))
        self.check_reductions()
        received, senders, sent = self.check_messages()
        self.check_progress(received, senders, sent)

    def check_computations(self, section: Section, mine: Tensor) -> None:
        """Checks that each task of a section stands once and on its rank, and those of a micro-batch in
        order.
        """
        at, tasks = mine.nonzero()[:, 0], self.section_tasks[section.name]
        rows, tp, micros = self.columns.take_rows(at), tasks.ranks.shape[1], len(tasks.replica)
        _require(
            _is_in_range(rows.micro, micros)
            and _columns_equal(rows, stage=section.stage, **_NO_MESSAGE_VALUES)
        )
        # start[kind]: first task of a kind, and index[rank]: the rank's place in its replica; -1 if it has
        # none.
        start, index = torch.full((len(INSTRUCTION_KINDS),), _ABSENT), torch.full((self.world_size,), _ABSENT)
        start[list(tasks.starts)] = int_tensor(tasks.starts.values())
        index[tasks.ranks] = torch.arange(tp).expand_as(tasks.ranks)
        replica = tasks.replica[rows.micro]
        _require(torch.equal(rows.replica, replica) and bool((start[rows.kind] >= 0).all()))
        _require(
            bool((index[rows.rank] >= 0).all())
            and torch.equal(tasks.ranks[replica, index[rows.rank]], rows.rank)
        )
        # Equally many instructions as tasks, each at a place of its own: every task stands exactly once.
        task_numbers = start[rows.kind] + rows.micro * tp + index[rows.rank]
        self.task_place[task_numbers] = at
        micros_to_run = torch.arange(micros)[~tasks.prefetched]
        expected = [tasks.micro_batch_tasks(kind, micros_to_run).flatten() for kind in tasks.starts]
        _require(len(task_numbers) == sum(map(len, expected)))
        for first, then in pairwise([torch.empty(0, dtype=torch.int64), *expected]):
            _require(
                bool((self.task_place[then] >= 0).all())
                and (not len(first) or bool((self.task_place[first] < self.task_place[then]).all()))
            )

    def check_reductions(self) -> None:
        """Checks that each rank reduces each of its sections once, after the section's backwards."""
        at = (self.columns.kind == KIND_REDUCE).nonzero()[:, 0]
        rows, count = self.columns.take_rows(at), len(self.plan.sections)
        _require(
            _is_in_range(rows.section, count)
            and _columns_equal(rows, stage=0, micro=-1, **_NO_MESSAGE_VALUES)
        )
        # By section and rank: the replica, the position of the last backward, and of the reduction.
        replica, last = (torch.full((count, self.world_size), value) for value in (_ABSENT, -1))
        for i, s in enumerate(self.plan.sections):
            tasks = self.section_tasks[s.name]
            replica[i, tasks.ranks] = torch.arange(len(tasks.ranks))[:, None].expand_as(tasks.ranks)
            for kind in tasks.starts.keys() - {KIND_FORWARD}:
                backwards = tasks.micro_batch_tasks(kind, torch.arange(len(tasks.replica)))
                last[i].scatter_reduce_(
                    0, tasks.ranks[tasks.replica].flatten(), self.task_place[backwards].flatten(), "amax"
                )
        reduced = torch.full((count, self.world_size), _ABSENT)
        reduced[rows.section, rows.rank] = at
        _require(
            torch.equal(rows.replica, replica[rows.section, rows.rank])
            and torch.equal(reduced >= 0, replica >= 0)
        )
        _require(
            len(at) == int((replica >= 0).sum()) and bool((last[replica >= 0] < reduced[replica >= 0]).all())
        )

    # -- messages

    def check_messages(self) -> tuple[Tensor, Tensor, Tensor]:
        """Checks that each message is sent after its producer, received before its consumer, and in the order
        of its channel.

        Returns, by message, the position of its RECV, its sender, and the position of its SEND.
        """
        sections = {s.name: s for s in self.plan.sections}
        parts: list[_LinkColumns] = []
        for i, edge in enumerate(self.plan.edges):
            if not (micros := micro_batch_pairs(edge, self.schedule)):
                continue
            src, dst = (int_tensor(column) for column in zip(*micros, strict=True))
            parts.append(self.build_links(edge, 2 * i, src, dst))
            if returns_gradient(edge, sections):
                parts.append(self.build_links(edge, 2 * i + 1, src, dst))
        links = (
            _LinkColumns(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
            if parts
            else _LinkColumns(*[int_tensor(())] * 9)
        )
        produced, consumed = (
            torch.where(tasks >= 0, self.task_place[tasks.clamp(min=0)], _ABSENT) if len(tasks) else tasks
            for tasks in (links.producer_task, links.consumer_task)
        )
        within, crossing = (links.parts == 0).nonzero()[:, 0], (links.parts > 0).nonzero()[:, 0]
        _require(bool((produced[within] < consumed[within]).all()))
        links, produced, consumed = links.take_rows(crossing), produced[crossing], consumed[crossing]
        sent, received = self.locate_transfers(KIND_SEND, links), self.locate_transfers(KIND_RECEIVE, links)
        _require(bool((produced < sent).all()) and bool((received < consumed).all()))
        # Sorted by channel and then by SEND, the positions of the RECVs must rise within each channel.
        channel = (links.edge_direction * self.world_size + links.sender) * self.world_size + links.receiver
        order = torch.argsort(sent)
        order = order[torch.argsort(channel[order], stable=True)]
        same_channel = channel[order][1:] == channel[order][:-1]
        _require(bool((received[order][1:] > received[order][:-1])[same_channel].all()))
        return received, links.sender, sent

    def build_links(self, edge: Edge, edge_direction: int, src: Tensor, dst: Tensor) -> _LinkColumns:
        """Returns what passes over an edge between pairs of micro-batches: tensors, or gradients if
        `edge_direction` is odd.
        """
        is_gradient = edge_direction % 2
        kind, ends = (
            (KIND_BACKWARD, (edge.dst, edge.src)) if is_gradient else (KIND_FORWARD, (edge.src, edge.dst))
        )
        (a, m), (b, n) = zip(
            (self.section_tasks[end] for end in ends),
            ((dst, src) if is_gradient else (src, dst)),
            strict=True,
        )
        producers, consumers = a.micro_batch_tasks(kind, m), b.micro_batch_tasks(kind, n)
        if not is_gradient:
            producers = torch.where(a.prefetched[m][:, None], _ABSENT, producers)
        sources, targets = a.ranks[a.replica[m]], b.ranks[b.replica[n]]
        if producers.shape[1] == consumers.shape[1] == 1:
            crosses = (sources != targets).long()[:, 0]
            zeros = torch.zeros_like(src)
            return _LinkColumns(
                zeros + edge_direction,
                src,
                dst,
                sources[:, 0],
                targets[:, 0],
                zeros,
                crosses,
                producers[:, 0],
                consumers[:, 0],
            )
        pieces: list[tuple[int, ...]] = []
        for i, (sources_i, targets_i) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
            pieces += [
                (i, r, r, 0, 0, sources_i.index(r), k) for k, r in enumerate(targets_i) if r in sources_i
            ]
            pieces += [
                (i, *piece, sources_i.index(piece.sender), targets_i.index(piece.receiver))
                for piece in route_message(tuple(sources_i), tuple(targets_i))
            ]
        i, sender, receiver, slice_index, slice_count, producer_index, consumer_index = (
            (int_tensor(column) for column in zip(*pieces, strict=True)) if pieces else [int_tensor(())] * 7
        )
        return _LinkColumns(
            torch.full_like(i, edge_direction),
            src[i],
            dst[i],
            sender,
            receiver,
            slice_index,
            slice_count,
            producers[i, producer_index],
            consumers[i, consumer_index],
        )

    def locate_transfers(self, kind: int, links: _LinkColumns) -> Tensor:
        """Returns the position of each message's SEND or RECV; each must exist once, on its rank, and no
        other may exist.
        """
        at = (self.columns.kind == kind).nonzero()[:, 0]
        rows = self.columns.take_rows(at)
        direction_count = 2 * len(self.plan.edges)
        micro_limit = max((len(tasks.replica) for tasks in self.section_tasks.values()), default=0)
        _require(len(at) == len(links.edge_direction) and _columns_equal(rows, **_NO_COMPUTATION_VALUES))
        _require(
            _is_in_range(rows.edge, direction_count)
            and _is_in_range(rows.direction, 2)
            and _is_in_range(rows.peer, self.world_size)
        )
        _require(_is_in_range(rows.src, micro_limit) and _is_in_range(rows.dst, micro_limit))
        sender, receiver = (rows.rank, rows.peer) if kind == KIND_SEND else (rows.peer, rows.rank)
        pairs = [
            (edge_direction * micro_limit + a) * micro_limit + b
            for edge_direction, a, b in (
                (links.edge_direction, links.src, links.dst),
                (2 * rows.edge + rows.direction, rows.src, rows.dst),
            )
        ]
        # Number the pairs of micro-batches that occur, so that a key with sender and receiver fits into an
        # int64; then both sides must have the same distinct keys.
        expected_pair, actual_pair = torch.unique(torch.cat(pairs), return_inverse=True)[1].view(2, len(at))
        (expected, by_expected), (actual, by_actual) = (
            ((pair * self.world_size + a) * self.world_size + b).sort()
            for pair, a, b in ((expected_pair, links.sender, links.receiver), (actual_pair, sender, receiver))
        )
        _require(torch.equal(expected, actual) and bool((actual[1:] > actual[:-1]).all()))
        _require(
            torch.equal(links.part[by_expected], rows.part[by_actual])
            and torch.equal(links.parts[by_expected], rows.parts[by_actual])
        )
        position = torch.empty_like(at)
        position[by_expected] = at[by_actual]
        return position

    # -- running

    def check_progress(self, received: Tensor, senders: Tensor, sent: Tensor) -> None:
        """Checks that no rank waits forever at a receive, a reduction or a computation of several ranks."""
        reduced, count = (self.columns.kind == KIND_REDUCE).nonzero()[:, 0], len(self.plan.sections)
        reductions = BlockingPoints.for_groups(reduced, self.columns.section[reduced])
        computed = collective_points(self.plan.sections, self.schedule.micro_batches, self.columns, count)
        _require(
            all_ranks_finish(
                BlockingPoints.concatenate([BlockingPoints(received, senders, sent), reductions, computed]),
                self.program_ends,
            )
        )
