"""Whether a schedule is valid, in one pass: what every rank asks before every step, so it must take little
time.

There are tens of thousands of instructions, so they are compared as columns of numbers. Each of them must be
one that the micro-batches call for, once and on its rank; on each rank what makes something must stand before
what uses it, and the receives of a channel in the order of its sends. Then the programs are run, as far as
ranks wait at all: at receives, at reductions, and at what several ranks compute together. The schedule is
valid if all programs end. The rules are those of `runtime/validation/full_check.py`, which says what is wrong
where this says no.
"""

from __future__ import annotations

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
from secc.runtime.plan.schema import Edge, Plan, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import (
    SampleMeta,
    Schedule,
    compute_kinds,
    gathers_parameters,
    is_active,
    micro_batch_pairs,
    returns_gradient,
)
from secc.runtime.schedule.cross_step_prefetch import find_prefetchable_sections
from secc.runtime.validation.progress_check import BlockingPoints, all_ranks_finish, collective_points


class _InvalidSchedule(Exception):
    """A schedule that is not valid."""


def is_valid_schedule(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> bool:
    """Whether `schedule` is complete, in order and free of deadlock for this global batch."""
    same = (
        schedule.micro_batches.keys() == {s.name for s in plan.sections}
        and len(schedule.programs) == plan.world_size
    )
    if not (same and _has_all_samples(plan, samples, schedule)):
        return False
    try:
        with pause_gc():
            _FastCheck(plan, schedule).run()
    except _InvalidSchedule:
        return False
    return True


def _require(holds: bool) -> None:
    if not holds:
        raise _InvalidSchedule


def _has_all_samples(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> bool:
    """Whether every active sample is in one micro-batch of each section, no other sample is, and
    micro-batches are as they should be."""
    patterns = {s.pattern for s in samples}
    among_others = schedule.own_samples is not None or bool(schedule.prefetched)
    able = find_prefetchable_sections(plan, SectionGraph(plan)) if among_others else []
    for section in plan.sections:
        micros, on = schedule.micro_batches[section.name], {p: is_active(section.when, p) for p in patterns}
        held = sorted([p for m in micros if not schedule.is_of_next_batch(m) for p in m.samples])
        if held != [p for p, s in enumerate(samples[: schedule.own_samples]) if on[s.pattern]]:
            return False
        if among_others and not _prefetches_correctly(samples, schedule, section, able):
            return False
        for i, m in enumerate(micros):
            if m.index != i or m.section != section.name or not 0 <= m.replica < section.mesh.dp:
                return False
            if not (0 if gathers_parameters(section) else 1) <= len(m.samples) <= section.micro_batch or (
                len(m.samples) > 1 and any(a >= b for a, b in pairwise(m.samples))
            ):
                return False
        if (
            gathers_parameters(section)
            and len({sum(m.replica == r for m in micros) for r in range(section.mesh.dp)}) > 1
        ):
            return False
    return True


def _prefetches_correctly(
    samples: Sequence[SampleMeta], schedule: Schedule, section: Section, able: Sequence[Section]
) -> bool:
    """Whether a section computes micro-batches in another step than their own only if it is able to, and
    later samples once."""
    micros = schedule.micro_batches[section.name]
    computed = schedule.prefetched.get(section.name, frozenset())
    later = [m for m in micros if schedule.is_of_next_batch(m)]
    held = [p for m in later for p in m.samples]
    if not held and not computed:
        return True
    known = len(held) == len(set(held)) and all(
        p < len(samples) and is_active(section.when, samples[p].pattern) for p in held
    )
    return section in able and known and computed <= set(range(len(micros) - len(later)))


# -- instructions as numbers


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
    """Whether all rows have these values."""
    return all(bool((getattr(rows, name) == value).all()) for name, value in values.items())


def _is_in_range(column: Tensor, count: int) -> bool:
    return len(column) == 0 or (int(column.min()) >= 0 and int(column.max()) < count)


class _SectionTasks(NamedTuple):
    """The jobs of a section: those of micro-batch m, kind k have numbers from `starts[k] + m * tp` on, one
    for each rank of its replica."""

    starts: dict[int, int]
    ranks: Tensor  # of each replica
    replica: Tensor  # of each micro-batch
    prefetched: Tensor  # micro-batches of which the step before has made the forward

    def micro_batch_tasks(self, kind: int, micros: Tensor) -> Tensor:
        """Jobs of micro-batches, on all ranks of their replicas."""
        tp = self.ranks.shape[1]
        return self.starts[kind] + (micros * tp)[:, None] + torch.arange(tp)


class _LinkColumns(NamedTuple):
    """What passes between jobs on an edge one way: within a rank, or from one to another in parts."""

    edge_direction: Tensor
    src: Tensor
    dst: Tensor
    sender: Tensor
    receiver: Tensor
    part: Tensor
    parts: Tensor  # 0 within a rank
    producer_task: Tensor  # jobs
    consumer_task: Tensor

    def take_rows(self, places: Tensor) -> _LinkColumns:
        """Some of them."""
        return _LinkColumns(*(column[places] for column in self))


# -- the check


class _FastCheck:
    """The check of all programs. A *job* is a computation of a micro-batch on a rank; `place` is where it
    stands among all instructions."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.plan, self.schedule, self.world_size = plan, schedule, plan.world_size
        programs = ProgramTable.from_programs(schedule.programs, InstructionNames.from_plan(plan))
        self.columns, self.program_ends = programs.columns, programs.program_ends
        self.section_tasks: dict[str, _SectionTasks] = {}
        self.task_count = 0
        for s in plan.sections:
            micros = schedule.micro_batches[s.name]
            ranks = torch.tensor(ranks_by_replica(s), dtype=torch.int64)
            starts = {
                INSTRUCTION_KINDS.index(kind): self.task_count + k * len(micros) * ranks.shape[1]
                for k, kind in enumerate(compute_kinds(s))
            }
            self.task_count += len(starts) * len(micros) * ranks.shape[1]
            done = torch.zeros(len(micros), dtype=torch.bool)
            done[int_tensor(schedule.prefetched.get(s.name, ()))] = True
            self.section_tasks[s.name] = _SectionTasks(
                starts, ranks, int_tensor(m.replica for m in micros), done
            )
        self.task_place = torch.full((self.task_count,), NO_NAME)

    def run(self) -> None:
        """Raises _Wrong for a schedule that is not valid."""
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
        """Each job of a section stands once and on its rank, and those of a micro-batch in their order."""
        at, own = mine.nonzero()[:, 0], self.section_tasks[section.name]
        rows, tp, micros = self.columns.take_rows(at), own.ranks.shape[1], len(own.replica)
        _require(
            _is_in_range(rows.micro, micros)
            and _columns_equal(rows, stage=section.stage, **_NO_MESSAGE_VALUES)
        )
        start, index = torch.full((len(INSTRUCTION_KINDS),), NO_NAME), torch.full((self.world_size,), NO_NAME)
        start[list(own.starts)] = int_tensor(own.starts.values())
        index[own.ranks] = torch.arange(tp).expand_as(own.ranks)
        replica = own.replica[rows.micro]
        _require(torch.equal(rows.replica, replica) and bool((start[rows.kind] >= 0).all()))
        _require(
            bool((index[rows.rank] >= 0).all())
            and torch.equal(own.ranks[replica, index[rows.rank]], rows.rank)
        )
        jobs = start[rows.kind] + rows.micro * tp + index[rows.rank]
        self.task_place[jobs] = at
        owed = torch.arange(micros)[~own.prefetched]
        expected = [own.micro_batch_tasks(kind, owed).flatten() for kind in own.starts]
        _require(len(jobs) == sum(map(len, expected)))
        for first, then in pairwise([torch.empty(0, dtype=torch.int64), *expected]):
            _require(
                bool((self.task_place[then] >= 0).all())
                and (not len(first) or bool((self.task_place[first] < self.task_place[then]).all()))
            )

    def check_reductions(self) -> None:
        """Each rank reduces each of its sections once, behind the section's backwards."""
        at = (self.columns.kind == KIND_REDUCE).nonzero()[:, 0]
        rows, count = self.columns.take_rows(at), len(self.plan.sections)
        _require(
            _is_in_range(rows.section, count)
            and _columns_equal(rows, stage=0, micro=-1, **_NO_MESSAGE_VALUES)
        )
        replica, last = (torch.full((count, self.world_size), value) for value in (NO_NAME, -1))
        for i, s in enumerate(self.plan.sections):
            own = self.section_tasks[s.name]
            replica[i, own.ranks] = torch.arange(len(own.ranks))[:, None].expand_as(own.ranks)
            for kind in own.starts.keys() - {KIND_FORWARD}:
                jobs = own.micro_batch_tasks(kind, torch.arange(len(own.replica)))
                last[i].scatter_reduce_(
                    0, own.ranks[own.replica].flatten(), self.task_place[jobs].flatten(), "amax"
                )
        reduced = torch.full((count, self.world_size), NO_NAME)
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
        """Each message is sent behind what makes it and received before what uses it, in the order of its
        channel.

        Where messages are received, their senders, and where they are sent.
        """
        sections = {s.name: s for s in self.plan.sections}
        found: list[_LinkColumns] = []
        for i, edge in enumerate(self.plan.edges):
            if not (micros := micro_batch_pairs(edge, self.schedule)):
                continue
            src, dst = (int_tensor(column) for column in zip(*micros, strict=True))
            found.append(self.build_links(edge, 2 * i, src, dst))
            if returns_gradient(edge, sections):
                found.append(self.build_links(edge, 2 * i + 1, src, dst))
        links = (
            _LinkColumns(*(torch.cat(columns) for columns in zip(*found, strict=True)))
            if found
            else _LinkColumns(*[int_tensor(())] * 9)
        )
        made, used = (
            torch.where(jobs >= 0, self.task_place[jobs.clamp(min=0)], NO_NAME) if len(jobs) else jobs
            for jobs in (links.producer_task, links.consumer_task)
        )
        within, crossing = (links.parts == 0).nonzero()[:, 0], (links.parts > 0).nonzero()[:, 0]
        _require(bool((made[within] < used[within]).all()))
        links, made, used = links.take_rows(crossing), made[crossing], used[crossing]
        sent, received = self.locate_transfers(KIND_SEND, links), self.locate_transfers(KIND_RECEIVE, links)
        _require(bool((made < sent).all()) and bool((received < used).all()))
        channel = (links.edge_direction * self.world_size + links.sender) * self.world_size + links.receiver
        order = torch.argsort(sent)
        order = order[torch.argsort(channel[order], stable=True)]
        alike = channel[order][1:] == channel[order][:-1]
        _require(bool((received[order][1:] > received[order][:-1])[alike].all()))
        return received, links.sender, sent

    def build_links(self, edge: Edge, way: int, src: Tensor, dst: Tensor) -> _LinkColumns:
        """What passes on an edge between these pairs of micro-batches: forward, or backward where `way` is
        odd."""
        back = way % 2
        kind, ends = (KIND_BACKWARD, (edge.dst, edge.src)) if back else (KIND_FORWARD, (edge.src, edge.dst))
        (a, m), (b, n) = zip(
            (self.section_tasks[end] for end in ends), ((dst, src) if back else (src, dst)), strict=True
        )
        made, used = a.micro_batch_tasks(kind, m), b.micro_batch_tasks(kind, n)
        if not back:
            made = torch.where(a.prefetched[m][:, None], NO_NAME, made)
        sources, targets = a.ranks[a.replica[m]], b.ranks[b.replica[n]]
        if made.shape[1] == used.shape[1] == 1:
            crosses = (sources != targets).long()[:, 0]
            none = torch.zeros_like(src)
            return _LinkColumns(
                none + way, src, dst, sources[:, 0], targets[:, 0], none, crosses, made[:, 0], used[:, 0]
            )
        found: list[tuple[int, ...]] = []
        for i, (some, others) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
            found += [(i, r, r, 0, 0, some.index(r), k) for k, r in enumerate(others) if r in some]
            found += [
                (i, *part, some.index(part.sender), others.index(part.receiver))
                for part in route_message(tuple(some), tuple(others))
            ]
        i, sender, receiver, part, parts, at, to = (
            (int_tensor(column) for column in zip(*found, strict=True)) if found else [int_tensor(())] * 7
        )
        return _LinkColumns(
            torch.full_like(i, way), src[i], dst[i], sender, receiver, part, parts, made[i, at], used[i, to]
        )

    def locate_transfers(self, kind: int, links: _LinkColumns) -> Tensor:
        """Where the messages are sent, or received; each must be, once and by its rank, and no other."""
        at = (self.columns.kind == kind).nonzero()[:, 0]
        rows = self.columns.take_rows(at)
        ways = 2 * len(self.plan.edges)
        most = max((len(own.replica) for own in self.section_tasks.values()), default=0)
        _require(len(at) == len(links.edge_direction) and _columns_equal(rows, **_NO_COMPUTATION_VALUES))
        _require(
            _is_in_range(rows.edge, ways)
            and _is_in_range(rows.direction, 2)
            and _is_in_range(rows.peer, self.world_size)
        )
        _require(_is_in_range(rows.src, most) and _is_in_range(rows.dst, most))
        sender, receiver = (rows.rank, rows.peer) if kind == KIND_SEND else (rows.peer, rows.rank)
        pairs = [
            (way * most + a) * most + b
            for way, a, b in (
                (links.edge_direction, links.src, links.dst),
                (2 * rows.edge + rows.direction, rows.src, rows.dst),
            )
        ]
        wanted, found = torch.unique(torch.cat(pairs), return_inverse=True)[1].view(2, len(at))
        (want, which), (have, where) = (
            ((p * self.world_size + a) * self.world_size + b).sort()
            for p, a, b in ((wanted, links.sender, links.receiver), (found, sender, receiver))
        )
        _require(torch.equal(want, have) and bool((have[1:] > have[:-1]).all()))
        _require(
            torch.equal(links.part[which], rows.part[where])
            and torch.equal(links.parts[which], rows.parts[where])
        )
        place = torch.empty_like(at)
        place[which] = at[where]
        return place

    # -- running

    def check_progress(self, received: Tensor, senders: Tensor, sent: Tensor) -> None:
        """Whether no rank waits for ever: at a receive, at a reduction, or at what several ranks compute
        together."""
        reduced, count = (self.columns.kind == KIND_REDUCE).nonzero()[:, 0], len(self.plan.sections)
        reductions = BlockingPoints.for_groups(reduced, self.columns.section[reduced])
        computed = collective_points(self.plan.sections, self.schedule.micro_batches, self.columns, count)
        _require(
            all_ranks_finish(
                BlockingPoints.concatenate([BlockingPoints(received, senders, sent), reductions, computed]),
                self.program_ends,
            )
        )
