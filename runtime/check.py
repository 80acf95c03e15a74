"""The check before start: proves that a schedule computes the whole global batch and that no rank waits for ever.

It shares no code with the order that made the schedule, beyond the types: it derives from plan and samples what must be there, and
runs the programs, instruction by instruction, against a model of the communication:

- A SEND does not block: the engine posts it and keeps the buffer until the end of the step. A RECV blocks until the matching SEND
  is posted. Each channel (an edge, a direction and a pair of ranks) delivers in order.
- With `strict=True` a SEND blocks too, until its peer has reached the matching RECV (rendezvous without buffers). Sections that run
  all their forwards before their backwards rely on posted sends, so their schedules do not pass it in general.
- A REDUCE blocks until every replica of its section has reached it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence

from secc.runtime.accept import accepts
from secc.runtime.grid import Cell, grid
from secc.runtime.plan import Plan, Section
from secc.runtime.program import (
    Instruction,
    MicroBatch,
    SampleMeta,
    Schedule,
    active,
    owes_backward,
    pairs,
    replica_ranks,
    returns_gradient,
)

Link = tuple[str, str, int, int, int, int]  # edge, direction, producer's and consumer's micro-batch, sending and receiving rank


class ScheduleError(Exception):
    """A schedule that must not run: what is wrong, and the programs around the cells where it shows. A defect of secc, not of the user."""


def check(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule, *, strict: bool = False) -> None:
    """Raise ScheduleError unless `schedule` is complete, in order and free of deadlock for this global batch.

    Every rank asks this before every step, at the same time, so it costs a step what it costs one rank: a quick pass answers, and only
    what it does not accept, or a strict check, goes through the checks that can say what is wrong.
    """
    if not strict and accepts(plan, samples, schedule):
        return
    checker = Checker(plan, samples, schedule)
    checker.micro_batches()
    checker.instructions()
    checker.order()
    checker.channels()
    checker.deadlock(strict)
    if not strict:
        checker.fail("the quick pass refuses what no check finds wrong")


class Checker:
    """The checks of one schedule; each builds on those before it."""

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> None:
        self.plan, self.samples, self.schedule = plan, samples, schedule
        self.sections = {s.name: s for s in plan.sections}
        self.ranks = {s.name: replica_ranks(s) for s in plan.sections}
        self.links: list[Link] = []
        self.cell: dict[Instruction, Cell] = {}  # STEP apart, an instruction stands once in all programs

    # -- which samples ------------------------------------------------------------------------------------------------------------

    def micro_batches(self) -> None:
        """Every active sample is in exactly one micro-batch of each section, and no other sample is."""
        if self.schedule.micro_batches.keys() != self.sections.keys():
            self.fail(f"it has micro-batches of {sorted(self.schedule.micro_batches)}, but the sections are {sorted(self.sections)}")
        for name, micros in self.schedule.micro_batches.items():
            for i, m in enumerate(micros):
                self._micro_batch(self.sections[name], i, m)
            held = Counter(p for m in micros for p in m.samples)
            owed = {p for p, sample in enumerate(self.samples) if active(self.sections[name].when, sample.pattern)}
            for p in sorted(held.keys() | owed):
                if held[p] != (p in owed):
                    self.fail(f"section {name} has sample {p} in {held[p]} micro-batches, but must have it in {int(p in owed)}")

    def _micro_batch(self, section: Section, i: int, m: MicroBatch) -> None:
        what = f"micro-batch {i} of section {section.name}"
        if m.index != i or m.section != section.name:
            self.fail(f"{what} is named {m.index} of {m.section}")
        if not 0 <= m.replica < section.mesh.dp:
            self.fail(f"{what} is for replica {m.replica}, but there are {section.mesh.dp}")
        if not 0 < len(m.samples) <= section.micro_batch or list(m.samples) != sorted(m.samples):
            self.fail(f"{what} has samples {list(m.samples)}: from 1 to {section.micro_batch} of them are allowed, ascending")

    # -- which instructions -------------------------------------------------------------------------------------------------------

    def instructions(self) -> None:
        """Every instruction that the micro-batches call for stands once, on its rank, and no other; every program ends with STEP."""
        if len(self.schedule.programs) != self.plan.world_size:
            self.fail(f"it has {len(self.schedule.programs)} programs for {self.plan.world_size} ranks")
        self.links = list(self._links())
        expected = dict(self._expected())
        for rank, program in enumerate(self.schedule.programs):
            for index, instruction in enumerate(program):
                self._place(instruction, (rank, index), expected)
            if not program or program[-1].kind != "STEP":
                self.fail(f"the program of rank {rank} does not end with STEP", [(rank, len(program) - 1)])
        for instruction, rank in expected.items():
            if instruction not in self.cell:
                self.fail(f"rank {rank} lacks `{instruction}`", [(rank, len(self.schedule.programs[rank]) - 1)])

    def _place(self, instruction: Instruction, cell: Cell, expected: dict[Instruction, int]) -> None:
        rank, index = cell
        if instruction.kind == "STEP":
            if index != len(self.schedule.programs[rank]) - 1:
                self.fail(f"rank {rank} goes on after STEP", [cell])
        elif instruction not in expected:
            self.fail(f"rank {rank} has `{instruction}`, which nothing calls for", [cell])
        elif expected[instruction] != rank:
            self.fail(f"rank {rank} has `{instruction}`, which belongs to rank {expected[instruction]}", [cell])
        elif instruction in self.cell:
            self.fail(f"rank {rank} has `{instruction}` twice", [self.cell[instruction], cell])
        self.cell[instruction] = cell

    def _links(self) -> Iterator[Link]:
        """Every tensor and gradient that passes from one micro-batch to another, also within a rank."""
        for edge in self.plan.edges:
            sources, targets = self.schedule.micro_batches[edge.src], self.schedule.micro_batches[edge.dst]
            for src, dst in pairs(edge, self.schedule):
                a, b = self.ranks[edge.src][sources[src].replica], self.ranks[edge.dst][targets[dst].replica]
                yield edge.name, "fwd", src, dst, a, b
                if returns_gradient(edge, self.sections):
                    yield edge.name, "bwd", src, dst, b, a

    def _expected(self) -> Iterator[tuple[Instruction, int]]:
        """Every instruction but STEP, with its rank."""
        for name, micros in self.schedule.micro_batches.items():
            for m in micros:
                for kind in ("F", "B") if owes_backward(self.sections[name]) else ("F",):
                    yield self._compute(kind, m), self.ranks[name][m.replica]
            for replica, rank in enumerate(self.ranks[name]):
                yield Instruction("REDUCE", name, replica), rank
        for link in self.links:
            sender, receiver = link[4:]
            if sender != receiver:
                yield _transfer("SEND", link), sender
                yield _transfer("RECV", link), receiver

    # -- in which order -----------------------------------------------------------------------------------------------------------

    def order(self) -> None:
        """On every rank, what makes data stands before what uses it."""
        for first, then in self._before():
            (rank, a), (_, b) = self.cell[first], self.cell[then]
            if a > b:
                self.fail(f"rank {rank} has `{then}` before `{first}`, on which it depends", [(rank, a), (rank, b)])

    def _before(self) -> Iterator[tuple[Instruction, Instruction]]:
        """Pairs of instructions of one rank of which the first must stand first."""
        for name, micros in self.schedule.micro_batches.items():
            for m in micros if owes_backward(self.sections[name]) else ():
                yield self._compute("F", m), self._compute("B", m)
                yield self._compute("B", m), Instruction("REDUCE", name, m.replica)
        edges = {e.name: e for e in self.plan.edges}
        for link in self.links:
            name, direction, src, dst, sender, receiver = link
            source, target = self.schedule.micro_batches[edges[name].src][src], self.schedule.micro_batches[edges[name].dst][dst]
            ends = (("F", source), ("F", target)) if direction == "fwd" else (("B", target), ("B", source))
            made, used = (self._compute(kind, m) for kind, m in ends)
            if sender == receiver:
                yield made, used
            else:
                yield made, _transfer("SEND", link)
                yield _transfer("RECV", link), used

    def channels(self) -> None:
        """The receives of each channel stand in the order of its sends."""
        channels: dict[tuple[str, str, int, int], list[Link]] = defaultdict(list)
        for link in self.links:
            if link[4] != link[5]:
                channels[link[0], link[1], link[4], link[5]].append(link)
        for links in channels.values():
            sends = sorted(links, key=lambda link: self.cell[_transfer("SEND", link)])
            receives = sorted(links, key=lambda link: self.cell[_transfer("RECV", link)])
            for sent, received in zip(sends, receives, strict=True):
                if sent != received:
                    send, receive = _transfer("SEND", sent), _transfer("RECV", received)
                    message = f"`{receive}` on rank {received[5]} would get what `{send}` on rank {sent[4]} sends"
                    self.fail(f"{message}: the channel delivers in order", [self.cell[send], self.cell[receive]])

    # -- whether it ends ----------------------------------------------------------------------------------------------------------

    def deadlock(self, strict: bool) -> None:
        """Run the programs; every rank must reach its end."""
        programs = self.schedule.programs
        awaited = dict(self._awaited(strict))
        at, reached = [0] * len(programs), set[Instruction]()
        waiting: dict[Instruction, list[int]] = defaultdict(list)
        runnable = deque(range(len(programs)))
        while runnable:
            rank = runnable.popleft()
            while at[rank] < len(programs[rank]):
                instruction = programs[rank][at[rank]]
                reached.add(instruction)
                runnable += waiting.pop(instruction, ())
                missing = next((i for i in awaited.get(instruction, ()) if i not in reached), None)
                if missing is not None:
                    waiting[missing].append(rank)
                    break
                at[rank] += 1
        if waiting:
            self._blocked({rank: missing for missing, ranks in waiting.items() for rank in ranks}, at)

    def _awaited(self, strict: bool) -> Iterator[tuple[Instruction, Sequence[Instruction]]]:
        """What other ranks must have reached before an instruction completes."""
        for link in self.links:
            if link[4] != link[5]:
                yield _transfer("RECV", link), (_transfer("SEND", link),)
                if strict:
                    yield _transfer("SEND", link), (_transfer("RECV", link),)
        for name, ranks in self.ranks.items():
            members = [Instruction("REDUCE", name, replica) for replica in range(len(ranks))]
            yield from ((member, members) for member in members)

    def _blocked(self, missing: dict[int, Instruction], at: list[int]) -> None:
        """Name the ranks that wait for each other in a circle; every blocked rank waits for a blocked one."""
        rank, path = min(missing), []
        while rank not in path:
            path.append(rank)
            rank = self.cell[missing[rank]][0]
        circle = path[path.index(rank) :]
        stuck = {r: self.schedule.programs[r][at[r]] for r in circle}
        waits = [f"rank {r} at `{stuck[r]}` waits for `{missing[r]}` on rank {self.cell[missing[r]][0]}" for r in circle]
        self.fail("deadlock: " + "; ".join(waits), [(r, at[r]) for r in missing])

    def _compute(self, kind: str, m: MicroBatch) -> Instruction:
        return Instruction(kind, m.section, m.replica, self.sections[m.section].stage, m.index)

    def fail(self, message: str, marked: Iterable[Cell] = ()) -> None:
        """Raise a ScheduleError that shows the marked cells."""
        raise ScheduleError(f"the schedule is not valid: {message}\n{grid(self.schedule, marked)}")


def _transfer(kind: str, link: Link) -> Instruction:
    edge, direction, src, dst, sender, receiver = link
    peer = receiver if kind == "SEND" else sender
    return Instruction(kind, edge=edge, direction=direction, peer=peer, src_micro=src, dst_micro=dst)
