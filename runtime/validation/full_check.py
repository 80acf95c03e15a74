"""The check before start: proves that a schedule computes the whole global batch and that no rank waits for
ever.

It shares no code with the order that made the schedule, beyond the types: it derives from plan and samples
what must be there, and runs the programs, instruction by instruction, against a model of the communication:

- A SEND does not block: the engine posts it and keeps the buffer until the end of the step. A RECV blocks
  until the matching SEND
  is posted. Each channel (an edge, a direction and a pair of ranks) delivers in order.
- With `strict=True` a SEND blocks too, until its peer has reached the matching RECV (rendezvous without
  buffers). Sections that run
  all their forwards before their backwards rely on posted sends, so their schedules do not pass it in
  general.
- A REDUCE blocks until every rank of its section has reached it, an F or B until every rank of its replica
  has, and where replicas
  gather parameters, until all of these have come to theirs of the same round.

In a step among others (`runtime/schedule/cross_step_prefetch.py`) what the step before has computed is there
from the start, and the samples behind those of the global batch are the next one's.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from secc.runtime.plan.replica_routes import MessageSlice, Ranks, ranks_by_replica, route_message
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import (
    Instruction,
    MicroBatch,
    SampleMeta,
    Schedule,
    compute_kinds,
    gather_rounds,
    gathers_parameters,
    is_active,
    micro_batch_pairs,
    returns_gradient,
)
from secc.runtime.schedule.cross_step_prefetch import find_prefetchable_sections
from secc.runtime.validation.fast_check import is_valid_schedule
from secc.runtime.validation.render_programs import ProgramCell, render_programs

PlacedInstruction = tuple[int, Instruction]  # an instruction in the program of a rank


class MicroBatchLink(NamedTuple):
    """What passes from a micro-batch's rank to another's: a part of a message, or the whole of it within a
    rank (`part` is None)."""

    edge: str
    direction: str
    src: int
    dst: int
    sender: int
    receiver: int
    message_slice: MessageSlice | None


class ScheduleError(Exception):
    """A schedule that must not run: what is wrong, and the programs around the cells where it shows. A defect
    of secc, not of the user."""


def check_schedule(
    plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule, *, strict: bool = False
) -> None:
    """Raise ScheduleError unless `schedule` is complete, in order and free of deadlock for this global batch.

    Every rank asks this before every step, at the same time, so it costs a step what it costs one rank: a
    quick pass answers, and only what it does not accept, or a strict check, goes through the checks that can
    say what is wrong.
    """
    if not strict and is_valid_schedule(plan, samples, schedule):
        return
    checker = ScheduleChecker(plan, samples, schedule)
    checker.check_micro_batches()
    checker.check_prefetch()
    checker.check_instructions()
    checker.check_order()
    checker.check_channels()
    checker.check_deadlock(strict)
    if not strict:
        checker.fail("the quick pass refuses what no check finds wrong")


class ScheduleChecker:
    """The checks of one schedule; each builds on those before it."""

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> None:
        self.plan, self.samples, self.schedule = plan, samples, schedule
        self.sections = {s.name: s for s in plan.sections}
        self.ranks = {s.name: ranks_by_replica(s) for s in plan.sections}
        self.links: list[MicroBatchLink] = []
        self.cells: dict[
            PlacedInstruction, ProgramCell
        ] = {}  # STEP apart, an instruction stands once in a program

    # -- which samples

    def check_micro_batches(self) -> None:
        """Every active sample is in exactly one micro-batch of each section, and no other sample is."""
        if self.schedule.micro_batches.keys() != self.sections.keys():
            self.fail(
                f"it has micro-batches of {sorted(self.schedule.micro_batches)}, but the sections are {sorted(self.sections)}"
            )
        for name, micros in self.schedule.micro_batches.items():
            for i, m in enumerate(micros):
                self._check_micro_batch(self.sections[name], i, m)
            counts = [sum(m.replica == r for m in micros) for r in range(self.sections[name].mesh.dp)]
            if gathers_parameters(self.sections[name]) and len(set(counts)) > 1:
                self.fail(
                    f"the replicas of section {name} have {counts} micro-batches, but must have equally many to gather parameters"
                )
            held = Counter(p for m in micros if not self.schedule.is_of_next_batch(m) for p in m.samples)
            owed = {
                p
                for p, sample in enumerate(self.samples[: self.schedule.own_samples])
                if is_active(self.sections[name].when, sample.pattern)
            }
            for p in sorted(held.keys() | owed):
                if held[p] != (p in owed):
                    self.fail(
                        f"section {name} has sample {p} in {held[p]} micro-batches, but must have it in {int(p in owed)}"
                    )

    def check_prefetch(self) -> None:
        """Only sections that may do so compute micro-batches in another step than their own, of samples that
        are active, each once."""
        able = {s.name for s in find_prefetchable_sections(self.plan, SectionGraph(self.plan))}
        for name, micros in self.schedule.micro_batches.items():
            later = [m for m in micros if self.schedule.is_of_next_batch(m)]
            computed = self.schedule.prefetched.get(name, frozenset())
            if (later or computed) and name not in able:
                self.fail(
                    f"section {name} must not run ahead: it has a backward, or something that trains is upstream or on its ranks"
                )
            if not computed <= {m.index for m in micros if m not in later}:
                self.fail(
                    f"section {name} has {len(micros)} micro-batches, of which the step before cannot have computed {sorted(computed)}"
                )
            for p, count in Counter(p for m in later for p in m.samples).items():
                if (
                    count > 1
                    or p >= len(self.samples)
                    or not is_active(self.sections[name].when, self.samples[p].pattern)
                ):
                    self.fail(f"section {name} must not compute sample {p} ahead, or more than once")

    def _check_micro_batch(self, section: Section, i: int, m: MicroBatch) -> None:
        what = f"micro-batch {i} of section {section.name}"
        if m.index != i or m.section != section.name:
            self.fail(f"{what} is named {m.index} of {m.section}")
        if not 0 <= m.replica < section.mesh.dp:
            self.fail(f"{what} is for replica {m.replica}, but there are {section.mesh.dp}")
        least = 0 if gathers_parameters(section) else 1
        if not least <= len(m.samples) <= section.micro_batch or list(m.samples) != sorted(m.samples):
            self.fail(
                f"{what} has samples {list(m.samples)}: from {least} to {section.micro_batch} of them are allowed, ascending"
            )

    # -- which instructions

    def check_instructions(self) -> None:
        """Every instruction that the micro-batches call for stands once, on its rank, and no other; every
        program ends with STEP."""
        if len(self.schedule.programs) != self.plan.world_size:
            self.fail(f"it has {len(self.schedule.programs)} programs for {self.plan.world_size} ranks")
        self.links = list(self._find_links())
        expected = dict.fromkeys(self._expected_instructions())
        for rank, program in enumerate(self.schedule.programs):
            for index, instruction in enumerate(program):
                self._record_instruction(instruction, (rank, index), expected)
            if not program or program[-1].kind != "STEP":
                self.fail(f"the program of rank {rank} does not end with STEP", [(rank, len(program) - 1)])
        for rank, instruction in expected:
            if (rank, instruction) not in self.cells:
                self.fail(
                    f"rank {rank} lacks `{instruction}`", [(rank, len(self.schedule.programs[rank]) - 1)]
                )

    def _record_instruction(
        self, instruction: Instruction, cell: ProgramCell, expected: dict[PlacedInstruction, None]
    ) -> None:
        rank, index = cell
        placed = (rank, instruction)
        if instruction.kind == "STEP":
            if index != len(self.schedule.programs[rank]) - 1:
                self.fail(f"rank {rank} goes on after STEP", [cell])
        elif placed not in expected:
            owner = next((r for r, i in expected if i == instruction), None)
            if owner is None:
                self.fail(f"rank {rank} has `{instruction}`, which nothing calls for", [cell])
            self.fail(f"rank {rank} has `{instruction}`, which belongs to rank {owner}", [cell])
        elif placed in self.cells:
            self.fail(f"rank {rank} has `{instruction}` twice", [self.cells[placed], cell])
        self.cells[placed] = cell

    def _find_links(self) -> Iterator[MicroBatchLink]:
        """Every tensor and gradient that passes from one micro-batch to another, also within a rank."""
        for edge in self.plan.edges:
            sources, targets = self.schedule.micro_batches[edge.src], self.schedule.micro_batches[edge.dst]
            for src, dst in micro_batch_pairs(edge, self.schedule):
                a, b = self.ranks[edge.src][sources[src].replica], self.ranks[edge.dst][targets[dst].replica]
                yield from _links_between(edge.name, "fwd", src, dst, a, b)
                if returns_gradient(edge, self.sections):
                    yield from _links_between(edge.name, "bwd", src, dst, b, a)

    def _expected_instructions(self) -> Iterator[PlacedInstruction]:
        """Every instruction but STEP, with its rank."""
        for name, micros in self.schedule.micro_batches.items():
            for m in micros:
                for kind in (
                    () if self.schedule.is_prefetched(name, m.index) else compute_kinds(self.sections[name])
                ):
                    yield from (
                        (rank, self._compute_instruction(kind, m)) for rank in self.ranks[name][m.replica]
                    )
            for replica, ranks in enumerate(self.ranks[name]):
                yield from ((rank, Instruction("REDUCE", name, replica)) for rank in ranks)
        for link in self.links:
            if link.message_slice is not None:
                yield _place_send(link)
                yield _place_receive(link)

    # -- in which order

    def check_order(self) -> None:
        """On every rank, what makes data stands before what uses it."""
        for rank, first, then in self._required_orders():
            (_, a), (_, b) = self.cells[rank, first], self.cells[rank, then]
            if a > b:
                self.fail(
                    f"rank {rank} has `{then}` before `{first}`, on which it depends", [(rank, a), (rank, b)]
                )

    def _required_orders(self) -> Iterator[tuple[int, Instruction, Instruction]]:
        """A rank and two of its instructions of which the first must stand first."""
        for name, micros in self.schedule.micro_batches.items():
            kinds = list(compute_kinds(self.sections[name]))
            for m in micros if len(kinds) > 1 else ():
                for rank in self.ranks[name][m.replica]:
                    for first, then in pairwise(kinds):
                        yield rank, self._compute_instruction(first, m), self._compute_instruction(then, m)
                    yield (
                        rank,
                        self._compute_instruction(kinds[-1], m),
                        Instruction("REDUCE", name, m.replica),
                    )
        edges = {e.name: e for e in self.plan.edges}
        for link in self.links:
            edge = edges[link.edge]
            source = self.schedule.micro_batches[edge.src][link.src]
            target = self.schedule.micro_batches[edge.dst][link.dst]
            ends = (
                (("F", source), ("F", target)) if link.direction == "fwd" else (("B", target), ("B", source))
            )
            made, used = (self._compute_instruction(kind, m) for kind, m in ends)
            done = self.schedule.is_prefetched(edge.src, link.src)  # and so has no place in this step
            if link.message_slice is None and not done:
                yield link.sender, made, used
            if link.message_slice is not None:
                if not done:
                    yield link.sender, made, _place_send(link)[1]
                yield link.receiver, _place_receive(link)[1], used

    def check_channels(self) -> None:
        """The receives of each channel stand in the order of its sends."""
        channels: dict[tuple[str, str, int, int], list[MicroBatchLink]] = defaultdict(list)
        for link in self.links:
            if link.message_slice is not None:
                channels[link.edge, link.direction, link.sender, link.receiver].append(link)
        for links in channels.values():
            sends = sorted(links, key=lambda link: self.cells[_place_send(link)])
            receives = sorted(links, key=lambda link: self.cells[_place_receive(link)])
            for sent, received in zip(sends, receives, strict=True):
                if sent != received:
                    send, receive = _place_send(sent), _place_receive(received)
                    message = f"`{receive[1]}` on rank {received.receiver} would get what `{send[1]}` on rank {sent.sender} sends"
                    self.fail(
                        f"{message}: the channel delivers in order", [self.cells[send], self.cells[receive]]
                    )

    # -- whether it ends

    def check_deadlock(self, strict: bool) -> None:
        """Run the programs; every rank must reach its end."""
        programs = self.schedule.programs
        awaited = dict(self._awaited_instructions(strict))
        at, reached = [0] * len(programs), set[PlacedInstruction]()
        waiting: dict[PlacedInstruction, list[int]] = defaultdict(list)
        runnable = deque(range(len(programs)))
        while runnable:
            rank = runnable.popleft()
            while at[rank] < len(programs[rank]):
                placed = (rank, programs[rank][at[rank]])
                reached.add(placed)
                runnable += waiting.pop(placed, ())
                missing = next((i for i in awaited.get(placed, ()) if i not in reached), None)
                if missing is not None:
                    waiting[missing].append(rank)
                    break
                at[rank] += 1
        if waiting:
            self._report_deadlock({rank: missing for missing, ranks in waiting.items() for rank in ranks}, at)

    def _awaited_instructions(
        self, strict: bool
    ) -> Iterator[tuple[PlacedInstruction, Sequence[PlacedInstruction]]]:
        """What other ranks must have reached before an instruction completes."""
        for link in self.links:
            if link.message_slice is not None:
                yield _place_receive(link), (_place_send(link),)
                if strict:
                    yield _place_send(link), (_place_receive(link),)
        in_step = gather_rounds(self.plan.sections, self.schedule.micro_batches)
        for name, groups in self.ranks.items():
            members = [
                (rank, Instruction("REDUCE", name, replica))
                for replica, ranks in enumerate(groups)
                for rank in ranks
            ]
            yield from ((member, members) for member in members)
            for m in self.schedule.micro_batches[name]:
                if self.schedule.is_prefetched(name, m.index):
                    continue
                with_it = in_step.get((name, m.index), (m,))
                for kind in compute_kinds(self.sections[name]):
                    together = [
                        (rank, self._compute_instruction(kind, other))
                        for other in with_it
                        for rank in groups[other.replica]
                    ]
                    yield from (
                        ((rank, self._compute_instruction(kind, m)), together)
                        for rank in groups[m.replica]
                        if len(together) > 1
                    )

    def _report_deadlock(self, missing: dict[int, PlacedInstruction], at: list[int]) -> None:
        """Name the ranks that wait for each other in a circle; every blocked rank waits for a blocked one."""
        rank, path = min(missing), []
        while rank not in path:
            path.append(rank)
            rank = missing[rank][0]
        circle = path[path.index(rank) :]
        stuck = {r: self.schedule.programs[r][at[r]] for r in circle}
        waits = [
            f"rank {r} at `{stuck[r]}` waits for `{missing[r][1]}` on rank {missing[r][0]}" for r in circle
        ]
        self.fail("deadlock: " + "; ".join(waits), [(r, at[r]) for r in missing])

    def _compute_instruction(self, kind: str, m: MicroBatch) -> Instruction:
        return Instruction(kind, m.section, m.replica, self.sections[m.section].stage, m.index)

    def fail(self, message: str, marked: Iterable[ProgramCell] = ()) -> None:
        """Raise a ScheduleError that shows the marked cells."""
        raise ScheduleError(f"the schedule is not valid: {message}\n{render_programs(self.schedule, marked)}")


def _links_between(
    edge: str, direction: str, src: int, dst: int, sources: Ranks, targets: Ranks
) -> Iterator[MicroBatchLink]:
    yield from (MicroBatchLink(edge, direction, src, dst, r, r, None) for r in targets if r in sources)
    yield from (
        MicroBatchLink(edge, direction, src, dst, part.sender, part.receiver, part)
        for part in route_message(sources, targets)
    )


def _place_send(link: MicroBatchLink) -> PlacedInstruction:
    return link.sender, _transfer_instruction("SEND", link, link.receiver)


def _place_receive(link: MicroBatchLink) -> PlacedInstruction:
    return link.receiver, _transfer_instruction("RECV", link, link.sender)


def _transfer_instruction(kind: str, link: MicroBatchLink, peer: int) -> Instruction:
    assert link.message_slice is not None
    return Instruction(
        kind,
        edge=link.edge,
        direction=link.direction,
        peer=peer,
        src_micro=link.src,
        dst_micro=link.dst,
        part=link.message_slice.index,
        parts=link.message_slice.count,
    )
