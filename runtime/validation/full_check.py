"""The check before each step: proves that a schedule computes the whole global batch and that no rank waits
forever.

It shares no code with the scheduler beyond the types: it derives from plan and samples which instructions are
needed, and runs the programs, instruction by instruction, against a model of the communication:

- A SEND does not block: the engine posts it and keeps the buffer until the end of the step. A RECV blocks
  until the matching SEND is posted. Each channel (an edge, a direction and a pair of ranks) delivers in
  order.
- With `strict=True` a SEND blocks, too, until its peer has reached the matching RECV (rendezvous without
  buffers). Sections that run all forwards before their backwards rely on posted sends, so their schedules
  fail that in general.
- A REDUCE blocks until every rank of its section has reached it, an F or B until every rank of its replica
  has, and under ZeRO-3 until all replicas have reached theirs of the same round.

In a spliced step (`runtime/schedule/cross_step_prefetch.py`) the results of the previous step are present
from the start, and the samples after those of the global batch belong to the next one.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from secc.runtime.plan.replica_routes import MessageSlice, Ranks, ranks_by_replica, route_message
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import (
    Instruction,
    MicroBatch,
    SampleMeta,
    Schedule,
    compute_kinds,
    gather_rounds,
    micro_batch_pairs,
    replicas_in_lockstep,
    returns_gradient,
    runs_in_lockstep,
)
from secc.runtime.schedule.cross_step_prefetch import find_prefetchable_sections
from secc.runtime.validation.fast_check import is_valid_schedule
from secc.runtime.validation.render_programs import ProgramCell, render_programs

PlacedInstruction = tuple[int, Instruction]  # a rank and an instruction of its program


class MicroBatchLink(NamedTuple):
    """Data that passes from a micro-batch on one rank to another: a slice of a message, or all of it within a
    rank (`message_slice` is None).
    """

    edge: str
    direction: str
    src: int
    dst: int
    sender: int
    receiver: int
    message_slice: MessageSlice | None


class ScheduleError(Exception):
    """An invalid schedule: the error, and the programs around the cells where it shows. A defect of secc, not
    of the user.
    """


def check_schedule(
    plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule, *, strict: bool = False
) -> None:
    """Raises ScheduleError unless `schedule` is complete, in order and free of deadlock for this global
    batch.

    Every rank checks every step, all at the same time, so the check delays each step. A fast check accepts
    valid schedules; only what it rejects, or a strict check, goes through the slow checks, which explain the
    error.
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
        checker.fail("the fast check rejects it, but no slow check finds an error")


class ScheduleChecker:
    """The checks of one schedule; each relies on those before it.

    `links` is all data that passes between micro-batches, `cells` the place of each instruction but STEP.
    """

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> None:
        self.plan, self.samples, self.schedule = plan, samples, schedule
        self.sections = {s.name: s for s in plan.sections}
        self.ranks = {s.name: ranks_by_replica(s) for s in plan.sections}
        self.links: list[MicroBatchLink] = []
        self.cells: dict[PlacedInstruction, ProgramCell] = {}

    # -- samples

    def check_micro_batches(self) -> None:
        """Checks that every active sample is in exactly one micro-batch of each section, and no other sample
        is.
        """
        if self.schedule.micro_batches.keys() != self.sections.keys():
            self.fail(
                f"expected micro-batches of the sections {sorted(self.sections)}, "
                f"got those of {sorted(self.schedule.micro_batches)}"
            )
        for name, micros in self.schedule.micro_batches.items():
            for i, m in enumerate(micros):
                self._check_micro_batch(self.sections[name], i, m)
            counts = [sum(m.replica == r for m in micros) for r in range(self.sections[name].mesh.dp)]
            together = replicas_in_lockstep(self.sections[name])
            groups = [counts[first : first + together] for first in range(0, len(counts), together)]
            if any(len(set(group)) > 1 for group in groups):
                self.fail(
                    f"the replicas of section {name} have {counts} micro-batches, but each {together} in a "
                    "row must have equally many to gather parameters or exchange tokens"
                )
            occurrences = Counter(
                p for m in micros if not self.schedule.is_of_next_batch(m) for p in m.samples
            )
            active = {
                p
                for p, sample in enumerate(self.samples[: self.schedule.own_samples])
                if is_active(self.sections[name].when, sample.pattern)
            }
            for p in sorted(occurrences.keys() | active):
                if occurrences[p] != (p in active):
                    self.fail(
                        f"section {name}: expected sample {p} in {int(p in active)} micro-batches, "
                        f"got {occurrences[p]}"
                    )

    def check_prefetch(self) -> None:
        """Checks that only prefetchable sections cross steps, with active samples of the next batch, each
        once.
        """
        prefetchable = {s.name for s in find_prefetchable_sections(self.plan, SectionGraph(self.plan))}
        for name, micros in self.schedule.micro_batches.items():
            next_batch = [m for m in micros if self.schedule.is_of_next_batch(m)]
            prefetched = self.schedule.prefetched.get(name, frozenset())
            if (next_batch or prefetched) and name not in prefetchable:
                self.fail(
                    f"section {name} must not run ahead: it has a backward, "
                    "or trained sections are upstream or on its ranks"
                )
            if not prefetched <= {m.index for m in micros if m not in next_batch}:
                self.fail(
                    f"section {name}: expected prefetched micro-batches among its {len(micros)}, "
                    f"got {sorted(prefetched)}"
                )
            for p, count in Counter(p for m in next_batch for p in m.samples).items():
                if (
                    count > 1
                    or p >= len(self.samples)
                    or not is_active(self.sections[name].when, self.samples[p].pattern)
                ):
                    self.fail(f"section {name}: sample {p} of the next batch is inactive, or computed twice")

    def _check_micro_batch(self, section: Section, i: int, m: MicroBatch) -> None:
        what = f"micro-batch {i} of section {section.name}"
        if m.index != i or m.section != section.name:
            self.fail(f"{what}: expected this index and section, got {m.index} of {m.section}")
        if not 0 <= m.replica < section.mesh.dp:
            self.fail(f"{what}: expected a replica below {section.mesh.dp}, got {m.replica}")
        least = 0 if runs_in_lockstep(section) else 1
        if not least <= len(m.samples) <= section.most_samples or list(m.samples) != sorted(m.samples):
            self.fail(
                f"{what}: expected {least} to {section.most_samples} ascending samples, got {list(m.samples)}"
            )

    # -- instructions

    def check_instructions(self) -> None:
        """Checks that exactly the instructions that the micro-batches need are there, once and on their
        ranks, and that every program ends with STEP.
        """
        if len(self.schedule.programs) != self.plan.world_size:
            self.fail(f"expected {self.plan.world_size} programs, got {len(self.schedule.programs)}")
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
                self.fail(f"rank {rank} has `{instruction}`, which no micro-batch needs", [cell])
            self.fail(f"rank {rank} has `{instruction}`, which belongs to rank {owner}", [cell])
        elif placed in self.cells:
            self.fail(f"rank {rank} has `{instruction}` twice", [self.cells[placed], cell])
        self.cells[placed] = cell

    def _find_links(self) -> Iterator[MicroBatchLink]:
        """Yields every tensor and gradient that passes between micro-batches, also within a rank."""
        for edge in self.plan.edges:
            sources, targets = self.schedule.micro_batches[edge.src], self.schedule.micro_batches[edge.dst]
            for src, dst in micro_batch_pairs(edge, self.schedule):
                a, b = self.ranks[edge.src][sources[src].replica], self.ranks[edge.dst][targets[dst].replica]
                yield from _links_between(edge.name, "fwd", src, dst, a, b)
                if returns_gradient(edge, self.sections):
                    yield from _links_between(edge.name, "bwd", src, dst, b, a)

    def _expected_instructions(self) -> Iterator[PlacedInstruction]:
        """Yields every instruction but STEP, with its rank."""
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

    # -- order

    def check_order(self) -> None:
        """Checks on every rank that data is produced before it is used."""
        for rank, first, then in self._required_orders():
            (_, a), (_, b) = self.cells[rank, first], self.cells[rank, then]
            if a > b:
                self.fail(
                    f"rank {rank} has `{then}` before `{first}`, on which it depends", [(rank, a), (rank, b)]
                )

    def _required_orders(self) -> Iterator[tuple[int, Instruction, Instruction]]:
        """Yields (rank, first, then): two instructions of a rank in the order in which they must stand."""
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
            producer, consumer = (self._compute_instruction(kind, m) for kind, m in ends)
            is_prefetched = self.schedule.is_prefetched(edge.src, link.src)  # then it has no F in this step
            if link.message_slice is None and not is_prefetched:
                yield link.sender, producer, consumer
            if link.message_slice is not None:
                if not is_prefetched:
                    yield link.sender, producer, _place_send(link)[1]
                yield link.receiver, _place_receive(link)[1], consumer

    def check_channels(self) -> None:
        """Checks that the receives of each channel stand in the order of its sends."""
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
                    self.fail(
                        f"`{receive[1]}` on rank {received.receiver} would receive the data of `{send[1]}` "
                        f"on rank {sent.sender}: the channel delivers in order",
                        [self.cells[send], self.cells[receive]],
                    )

    # -- deadlock

    def check_deadlock(self, strict: bool) -> None:
        """Runs the programs and checks that every rank reaches its end."""
        programs = self.schedule.programs
        awaited = dict(self._awaited_instructions(strict))
        position, reached = [0] * len(programs), set[PlacedInstruction]()
        waiting: dict[PlacedInstruction, list[int]] = defaultdict(list)
        runnable = deque(range(len(programs)))
        # A rank runs until an instruction waits for another one that no rank has reached yet; reaching that
        # one makes the rank runnable again.
        while runnable:
            rank = runnable.popleft()
            while position[rank] < len(programs[rank]):
                placed = (rank, programs[rank][position[rank]])
                reached.add(placed)
                runnable += waiting.pop(placed, ())
                missing = next((i for i in awaited.get(placed, ()) if i not in reached), None)
                if missing is not None:
                    waiting[missing].append(rank)
                    break
                position[rank] += 1
        if waiting:
            self._report_deadlock(
                {rank: missing for missing, ranks in waiting.items() for rank in ranks}, position
            )

    def _awaited_instructions(
        self, strict: bool
    ) -> Iterator[tuple[PlacedInstruction, Sequence[PlacedInstruction]]]:
        """Yields each instruction with the instructions that other ranks must have reached before it
        completes."""
        for link in self.links:
            if link.message_slice is not None:
                yield _place_receive(link), (_place_send(link),)
                if strict:
                    yield _place_send(link), (_place_receive(link),)
        round_of = gather_rounds(self.plan.sections, self.schedule.micro_batches)
        for name, replicas in self.ranks.items():
            members = [
                (rank, Instruction("REDUCE", name, replica))
                for replica, ranks in enumerate(replicas)
                for rank in ranks
            ]
            yield from ((member, members) for member in members)
            for m in self.schedule.micro_batches[name]:
                if self.schedule.is_prefetched(name, m.index):
                    continue
                round_members = round_of.get((name, m.index), (m,))
                for kind in compute_kinds(self.sections[name]):
                    together = [
                        (rank, self._compute_instruction(kind, other))
                        for other in round_members
                        for rank in replicas[other.replica]
                    ]
                    yield from (
                        ((rank, self._compute_instruction(kind, m)), together)
                        for rank in replicas[m.replica]
                        if len(together) > 1
                    )

    def _report_deadlock(self, missing: dict[int, PlacedInstruction], position: list[int]) -> None:
        """Fails with the ranks that wait for each other in a circle.

        There is one, because every blocked rank waits for a blocked rank.
        """
        rank, path = min(missing), []
        while rank not in path:
            path.append(rank)
            rank = missing[rank][0]
        circle = path[path.index(rank) :]
        blocked_at = {r: self.schedule.programs[r][position[r]] for r in circle}
        lines = [
            f"rank {r} at `{blocked_at[r]}` waits for `{missing[r][1]}` on rank {missing[r][0]}"
            for r in circle
        ]
        self.fail("deadlock: " + "; ".join(lines), [(r, position[r]) for r in missing])

    def _compute_instruction(self, kind: str, m: MicroBatch) -> Instruction:
        return Instruction(kind, m.section, m.replica, self.sections[m.section].stage, m.index)

    def fail(self, message: str, marked: Iterable[ProgramCell] = ()) -> None:
        """Raises a ScheduleError that shows the marked cells."""
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
