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

from secc.runtime.host.gc_control import collector_paused
from secc.runtime.plan.int_columns import integers
from secc.runtime.plan.program_table import (
    BACKWARD,
    BLANK,
    FORWARD,
    KINDS,
    RECEIVE,
    REDUCE,
    SEND,
    STEP,
    WEIGHT,
    Names,
    Programs,
    Rows,
)
from secc.runtime.plan.replica_routes import replicas, routes
from secc.runtime.plan.schema import Edge, Plan, Section
from secc.runtime.plan.section_graph import Graph
from secc.runtime.plan.step_program import (
    SampleMeta,
    Schedule,
    active,
    computations,
    gathers,
    pairs,
    returns_gradient,
)
from secc.runtime.schedule.cross_step_prefetch import sections
from secc.runtime.validation.progress_check import Waits, all_end, meetings


class _Wrong(Exception):
    """A schedule that is not valid."""


def accepts(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> bool:
    """Whether `schedule` is complete, in order and free of deadlock for this global batch."""
    same = (
        schedule.micro_batches.keys() == {s.name for s in plan.sections}
        and len(schedule.programs) == plan.world_size
    )
    if not (same and _complete(plan, samples, schedule)):
        return False
    try:
        with collector_paused():
            _Check(plan, schedule).run()
    except _Wrong:
        return False
    return True


def _need(holds: bool) -> None:
    if not holds:
        raise _Wrong


def _complete(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> bool:
    """Whether every active sample is in one micro-batch of each section, no other sample is, and
    micro-batches are as they should be."""
    patterns, among_others = {s.pattern for s in samples}, schedule.own is not None or bool(schedule.computed)
    able = sections(plan, Graph(plan)) if among_others else []
    for section in plan.sections:
        micros, on = schedule.micro_batches[section.name], {p: active(section.when, p) for p in patterns}
        held = sorted([p for m in micros if not schedule.is_later(m) for p in m.samples])
        if held != [p for p, s in enumerate(samples[: schedule.own]) if on[s.pattern]]:
            return False
        if among_others and not _may_cross(samples, schedule, section, able):
            return False
        for i, m in enumerate(micros):
            if m.index != i or m.section != section.name or not 0 <= m.replica < section.mesh.dp:
                return False
            if not (0 if gathers(section) else 1) <= len(m.samples) <= section.micro_batch or (
                len(m.samples) > 1 and any(a >= b for a, b in pairwise(m.samples))
            ):
                return False
        if (
            gathers(section)
            and len({sum(m.replica == r for m in micros) for r in range(section.mesh.dp)}) > 1
        ):
            return False
    return True


def _may_cross(
    samples: Sequence[SampleMeta], schedule: Schedule, section: Section, able: Sequence[Section]
) -> bool:
    """Whether a section computes micro-batches in another step than their own only if it is able to, and
    later samples once."""
    micros, computed = schedule.micro_batches[section.name], schedule.computed.get(section.name, frozenset())
    later = [m for m in micros if schedule.is_later(m)]
    held = [p for m in later for p in m.samples]
    if not held and not computed:
        return True
    known = len(held) == len(set(held)) and all(
        p < len(samples) and active(section.when, samples[p].pattern) for p in held
    )
    return section in able and known and computed <= set(range(len(micros) - len(later)))


# -- instructions as numbers
# ------------------------------------------------------------------------------------------------------


_NO_MESSAGE = {"edge": BLANK, "direction": BLANK, "peer": -1, "src": -1, "dst": -1, "part": 0, "parts": 1}
_NO_COMPUTATION = {"section": BLANK, "replica": 0, "stage": 0, "micro": -1}


def _says(rows: Rows, **values: int) -> bool:
    """Whether all rows have these values."""
    return all(bool((getattr(rows, name) == value).all()) for name, value in values.items())


def _within(column: Tensor, count: int) -> bool:
    return len(column) == 0 or (int(column.min()) >= 0 and int(column.max()) < count)


class _Own(NamedTuple):
    """The jobs of a section: those of micro-batch m, kind k have numbers from `starts[k] + m * tp` on, one
    for each rank of its replica."""

    starts: dict[int, int]
    ranks: Tensor  # of each replica
    replica: Tensor  # of each micro-batch
    computed: Tensor  # micro-batches of which the step before has made the forward

    def jobs(self, kind: int, micros: Tensor) -> Tensor:
        """Jobs of micro-batches, on all ranks of their replicas."""
        tp = self.ranks.shape[1]
        return self.starts[kind] + (micros * tp)[:, None] + torch.arange(tp)


class _Links(NamedTuple):
    """What passes between jobs on an edge one way: within a rank, or from one to another in parts."""

    way: Tensor
    src: Tensor
    dst: Tensor
    sender: Tensor
    receiver: Tensor
    part: Tensor
    parts: Tensor  # 0 within a rank
    made: Tensor  # jobs
    used: Tensor

    def at(self, places: Tensor) -> _Links:
        """Some of them."""
        return _Links(*(column[places] for column in self))


# -- the check
# --------------------------------------------------------------------------------------------------------------------


class _Check:
    """The check of all programs. A *job* is a computation of a micro-batch on a rank; `place` is where it
    stands among all instructions."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.plan, self.schedule, self.world = plan, schedule, plan.world_size
        programs = Programs.read(schedule.programs, Names.of(plan))
        self.rows, self.ends = programs.rows, programs.ends
        self.own: dict[str, _Own] = {}
        self.count = 0
        for s in plan.sections:
            micros, ranks = schedule.micro_batches[s.name], torch.tensor(replicas(s), dtype=torch.int64)
            starts = {
                KINDS.index(kind): self.count + k * len(micros) * ranks.shape[1]
                for k, kind in enumerate(computations(s))
            }
            self.count += len(starts) * len(micros) * ranks.shape[1]
            done = torch.zeros(len(micros), dtype=torch.bool)
            done[integers(schedule.computed.get(s.name, ()))] = True
            self.own[s.name] = _Own(starts, ranks, integers(m.replica for m in micros), done)
        self.place = torch.full((self.count,), BLANK)

    def run(self) -> None:
        """Raises _Wrong for a schedule that is not valid."""
        kind = self.rows.kind
        _need(bool((kind >= 0).all()) and torch.equal((kind == STEP).nonzero()[:, 0], self.ends - 1))
        for i, s in enumerate(self.plan.sections):
            self.computations(s, (self.rows.section == i) & (kind <= WEIGHT))
        _need(int((self.place >= 0).sum()) == int((kind <= WEIGHT).sum()))
        self.reductions()
        received, senders, sent = self.messages()
        self.programs_end(received, senders, sent)

    def computations(self, section: Section, mine: Tensor) -> None:
        """Each job of a section stands once and on its rank, and those of a micro-batch in their order."""
        at, own = mine.nonzero()[:, 0], self.own[section.name]
        rows, tp, micros = self.rows.at(at), own.ranks.shape[1], len(own.replica)
        _need(_within(rows.micro, micros) and _says(rows, stage=section.stage, **_NO_MESSAGE))
        start, index = torch.full((len(KINDS),), BLANK), torch.full((self.world,), BLANK)
        start[list(own.starts)] = integers(own.starts.values())
        index[own.ranks] = torch.arange(tp).expand_as(own.ranks)
        replica = own.replica[rows.micro]
        _need(torch.equal(rows.replica, replica) and bool((start[rows.kind] >= 0).all()))
        _need(
            bool((index[rows.rank] >= 0).all())
            and torch.equal(own.ranks[replica, index[rows.rank]], rows.rank)
        )
        jobs = start[rows.kind] + rows.micro * tp + index[rows.rank]
        self.place[jobs] = at
        owed = torch.arange(micros)[~own.computed]
        expected = [own.jobs(kind, owed).flatten() for kind in own.starts]
        _need(len(jobs) == sum(map(len, expected)))
        for first, then in pairwise([torch.empty(0, dtype=torch.int64), *expected]):
            _need(
                bool((self.place[then] >= 0).all())
                and (not len(first) or bool((self.place[first] < self.place[then]).all()))
            )

    def reductions(self) -> None:
        """Each rank reduces each of its sections once, behind the section's backwards."""
        at = (self.rows.kind == REDUCE).nonzero()[:, 0]
        rows, count = self.rows.at(at), len(self.plan.sections)
        _need(_within(rows.section, count) and _says(rows, stage=0, micro=-1, **_NO_MESSAGE))
        replica, last = (torch.full((count, self.world), value) for value in (BLANK, -1))
        for i, s in enumerate(self.plan.sections):
            own = self.own[s.name]
            replica[i, own.ranks] = torch.arange(len(own.ranks))[:, None].expand_as(own.ranks)
            for kind in own.starts.keys() - {FORWARD}:
                jobs = own.jobs(kind, torch.arange(len(own.replica)))
                last[i].scatter_reduce_(
                    0, own.ranks[own.replica].flatten(), self.place[jobs].flatten(), "amax"
                )
        reduced = torch.full((count, self.world), BLANK)
        reduced[rows.section, rows.rank] = at
        _need(
            torch.equal(rows.replica, replica[rows.section, rows.rank])
            and torch.equal(reduced >= 0, replica >= 0)
        )
        _need(
            len(at) == int((replica >= 0).sum()) and bool((last[replica >= 0] < reduced[replica >= 0]).all())
        )

    # -- messages
    # -----------------------------------------------------------------------------------------------------------------

    def messages(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each message is sent behind what makes it and received before what uses it, in the order of its
        channel.

        Where messages are received, their senders, and where they are sent.
        """
        sections = {s.name: s for s in self.plan.sections}
        found: list[_Links] = []
        for i, edge in enumerate(self.plan.edges):
            if not (micros := pairs(edge, self.schedule)):
                continue
            src, dst = (integers(column) for column in zip(*micros, strict=True))
            found.append(self.links(edge, 2 * i, src, dst))
            if returns_gradient(edge, sections):
                found.append(self.links(edge, 2 * i + 1, src, dst))
        links = (
            _Links(*(torch.cat(columns) for columns in zip(*found, strict=True)))
            if found
            else _Links(*[integers(())] * 9)
        )
        made, used = (
            torch.where(jobs >= 0, self.place[jobs.clamp(min=0)], BLANK) if len(jobs) else jobs
            for jobs in (links.made, links.used)
        )
        within, crossing = (links.parts == 0).nonzero()[:, 0], (links.parts > 0).nonzero()[:, 0]
        _need(bool((made[within] < used[within]).all()))
        links, made, used = links.at(crossing), made[crossing], used[crossing]
        sent, received = self.carried(SEND, links), self.carried(RECEIVE, links)
        _need(bool((made < sent).all()) and bool((received < used).all()))
        channel = (links.way * self.world + links.sender) * self.world + links.receiver
        order = torch.argsort(sent)
        order = order[torch.argsort(channel[order], stable=True)]
        alike = channel[order][1:] == channel[order][:-1]
        _need(bool((received[order][1:] > received[order][:-1])[alike].all()))
        return received, links.sender, sent

    def links(self, edge: Edge, way: int, src: Tensor, dst: Tensor) -> _Links:
        """What passes on an edge between these pairs of micro-batches: forward, or backward where `way` is
        odd."""
        back = way % 2
        kind, ends = (BACKWARD, (edge.dst, edge.src)) if back else (FORWARD, (edge.src, edge.dst))
        (a, m), (b, n) = zip(
            (self.own[end] for end in ends), ((dst, src) if back else (src, dst)), strict=True
        )
        made, used = a.jobs(kind, m), b.jobs(kind, n)
        if not back:
            made = torch.where(a.computed[m][:, None], BLANK, made)
        sources, targets = a.ranks[a.replica[m]], b.ranks[b.replica[n]]
        if made.shape[1] == used.shape[1] == 1:
            crosses = (sources != targets).long()[:, 0]
            none = torch.zeros_like(src)
            return _Links(
                none + way, src, dst, sources[:, 0], targets[:, 0], none, crosses, made[:, 0], used[:, 0]
            )
        found: list[tuple[int, ...]] = []
        for i, (some, others) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
            found += [(i, r, r, 0, 0, some.index(r), k) for k, r in enumerate(others) if r in some]
            found += [
                (i, *part, some.index(part.sender), others.index(part.receiver))
                for part in routes(tuple(some), tuple(others))
            ]
        i, sender, receiver, part, parts, at, to = (
            (integers(column) for column in zip(*found, strict=True)) if found else [integers(())] * 7
        )
        return _Links(
            torch.full_like(i, way), src[i], dst[i], sender, receiver, part, parts, made[i, at], used[i, to]
        )

    def carried(self, kind: int, links: _Links) -> Tensor:
        """Where the messages are sent, or received; each must be, once and by its rank, and no other."""
        at = (self.rows.kind == kind).nonzero()[:, 0]
        rows = self.rows.at(at)
        ways, most = 2 * len(self.plan.edges), max((len(own.replica) for own in self.own.values()), default=0)
        _need(len(at) == len(links.way) and _says(rows, **_NO_COMPUTATION))
        _need(_within(rows.edge, ways) and _within(rows.direction, 2) and _within(rows.peer, self.world))
        _need(_within(rows.src, most) and _within(rows.dst, most))
        sender, receiver = (rows.rank, rows.peer) if kind == SEND else (rows.peer, rows.rank)
        pairs = [
            (way * most + a) * most + b
            for way, a, b in (
                (links.way, links.src, links.dst),
                (2 * rows.edge + rows.direction, rows.src, rows.dst),
            )
        ]
        wanted, found = torch.unique(torch.cat(pairs), return_inverse=True)[1].view(2, len(at))
        (want, which), (have, where) = (
            ((p * self.world + a) * self.world + b).sort()
            for p, a, b in ((wanted, links.sender, links.receiver), (found, sender, receiver))
        )
        _need(torch.equal(want, have) and bool((have[1:] > have[:-1]).all()))
        _need(
            torch.equal(links.part[which], rows.part[where])
            and torch.equal(links.parts[which], rows.parts[where])
        )
        place = torch.empty_like(at)
        place[which] = at[where]
        return place

    # -- running
    # ------------------------------------------------------------------------------------------------------------------

    def programs_end(self, received: Tensor, senders: Tensor, sent: Tensor) -> None:
        """Whether no rank waits for ever: at a receive, at a reduction, or at what several ranks compute
        together."""
        reduced, count = (self.rows.kind == REDUCE).nonzero()[:, 0], len(self.plan.sections)
        reductions = Waits.together(reduced, self.rows.section[reduced])
        computed = meetings(self.plan.sections, self.schedule.micro_batches, self.rows, count)
        _need(all_end(Waits.joined([Waits(received, senders, sent), reductions, computed]), self.ends))
