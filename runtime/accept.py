"""Whether a schedule is valid, in one pass: what every rank asks before every step, so it must take little time.

The programs are run, instruction by instruction, against counters: what each computation still needs on its rank, what was sent on each
channel and not received, what is left to compute. An instruction that nothing calls for, that comes too early or twice, or on a wrong
rank ends the run at once; a rank that waits for a message or a reduction is left until it comes. The schedule is valid if all programs
end with nothing left. The rules are those of `runtime/check.py`, which says what is wrong where this says no.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import pairwise

from secc.runtime.ahead import sections
from secc.runtime.collector import collector_paused
from secc.runtime.graph import Graph
from secc.runtime.plan import Plan, Section
from secc.runtime.program import Instruction, SampleMeta, Schedule, active, computations, gathers, pairs, returns_gradient, rounds
from secc.runtime.routes import Ranks, replicas, routes

Job = tuple[str, str, int, int]  # kind, section, micro-batch, rank
Key = tuple[str, str, int, int, int, int]  # edge, direction, producer's and consumer's micro-batch, sender, receiver
Link = tuple[Job, Job, tuple[int, int]]  # the jobs that make and use the message, and which part of how many it is
Half = tuple[str, str, int]  # a job on any rank
Channel = tuple[str, str, int, int]  # edge, direction, sender, receiver


class _Wrong(Exception):
    """An instruction that must not stand where it stands."""


def accepts(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> bool:
    """Whether `schedule` is complete, in order and free of deadlock for this global batch."""
    same = schedule.micro_batches.keys() == {s.name for s in plan.sections} and len(schedule.programs) == plan.world_size
    if not (same and _complete(plan, samples, schedule)):
        return False
    try:
        with collector_paused():
            return _Run(plan, schedule).ends()
    except _Wrong:
        return False


def _complete(plan: Plan, samples: Sequence[SampleMeta], schedule: Schedule) -> bool:
    """Whether every active sample is in one micro-batch of each section, no other sample is, and micro-batches are as they should be."""
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
        if gathers(section) and len({sum(m.replica == r for m in micros) for r in range(section.mesh.dp)}) > 1:
            return False
    return True


def _may_cross(samples: Sequence[SampleMeta], schedule: Schedule, section: Section, able: Sequence[Section]) -> bool:
    """Whether a section computes micro-batches in another step than their own only if it is able to, and later samples once."""
    micros, computed = schedule.micro_batches[section.name], schedule.computed.get(section.name, frozenset())
    later = [m for m in micros if schedule.is_later(m)]
    held = [p for m in later for p in m.samples]
    if not held and not computed:
        return True
    known = len(held) == len(set(held)) and all(p < len(samples) and active(section.when, samples[p].pattern) for p in held)
    return section in able and known and computed <= set(range(len(micros) - len(later)))


class _Run:
    """One run of all programs."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self.programs, self.is_computed = schedule.programs, schedule.is_computed
        self.stage = {s.name: s.stage for s in plan.sections}
        self.replicas = {s.name: replicas(s) for s in plan.sections}
        self.replica = {name: {rank: r for r, ranks in enumerate(some) for rank in ranks} for name, some in self.replicas.items()}
        self.rounds = rounds(plan.sections, schedule.micro_batches)
        self.open: set[Job] = set()  # jobs that are not yet computed
        self.left: Counter[tuple[str, int]] = Counter()  # backwards on a rank that are not yet computed
        self.needs: defaultdict[Job, int] = defaultdict(int)  # inputs that are not yet on the job's rank
        self.feeds: defaultdict[Job, list[Job]] = defaultdict(list)  # jobs of the same rank that use what a job makes
        self.unsent: dict[Key, Link] = {}
        self.sent: defaultdict[Channel, deque[tuple[Key, Link]]] = defaultdict(deque)  # messages not yet received
        self.reached: defaultdict[object, set[int]] = defaultdict(set)  # ranks that reached a reduction, or a job of their replica
        self.passed: set[tuple[str, int]] = set()  # ... and completed the reduction
        self.waiting: defaultdict[object, list[int]] = defaultdict(list)  # ranks that wait for a message on a channel or for others
        self.runnable = deque(range(len(self.programs)))
        self._add(plan, schedule)
        self._connect(plan, schedule)

    def _add(self, plan: Plan, schedule: Schedule) -> None:
        for section in plan.sections:
            name, kinds = section.name, computations(section)
            for m in schedule.micro_batches[name]:
                for rank in self.replicas[name][m.replica]:
                    self.open |= {(kind, name, m.index, rank) for kind in kinds if not self.is_computed(name, m.index)}
                    self.left[name, rank] += len(kinds) - 1
                    for first, then in pairwise(kinds):
                        self._feed((first, name, m.index, rank), (then, name, m.index, rank))

    def _connect(self, plan: Plan, schedule: Schedule) -> None:
        sections = {s.name: s for s in plan.sections}
        for edge in plan.edges:
            gradient = returns_gradient(edge, sections)
            sources, targets = schedule.micro_batches[edge.src], schedule.micro_batches[edge.dst]
            for src, dst in pairs(edge, schedule):
                a, b = self.replicas[edge.src][sources[src].replica], self.replicas[edge.dst][targets[dst].replica]
                self._link(edge.name, "fwd", (src, dst), ("F", edge.src, src), ("F", edge.dst, dst), a, b)
                if gradient:
                    self._link(edge.name, "bwd", (src, dst), ("B", edge.dst, dst), ("B", edge.src, src), b, a)

    def _feed(self, made: Job, used: Job) -> None:
        if made[0] == "F" and self.is_computed(made[1], made[2]):
            return
        self.needs[used] += 1
        self.feeds[made].append(used)

    def _link(self, edge: str, direction: str, pair: tuple[int, int], made: Half, used: Half, sources: Ranks, targets: Ranks) -> None:
        """What travels from the ranks of one job to those of another; a rank that has both needs no message."""
        for rank in targets:
            if rank in sources:
                self._feed((*made, rank), (*used, rank))
        for part in routes(sources, targets):
            self.needs[*used, part.receiver] += 1
            self.unsent[edge, direction, *pair, part.sender, part.receiver] = (*made, part.sender), (*used, part.receiver), part[2:]

    # -- running ------------------------------------------------------------------------------------------------------------------

    def ends(self) -> bool:
        """Whether every program runs to its end and nothing is left. Raises _Wrong at an instruction that must not stand where it does."""
        at = [0] * len(self.programs)
        steps = {"F": self.compute, "B": self.compute, "W": self.compute, "SEND": self.send, "RECV": self.receive, "REDUCE": self.reduce}
        while self.runnable:
            rank = self.runnable.popleft()
            program = self.programs[rank]
            while at[rank] < len(program):
                i = program[at[rank]]
                kind = i[0]
                if kind in steps:
                    if not steps[kind](rank, i):
                        break
                elif kind != "STEP" or at[rank] != len(program) - 1:
                    return False
                at[rank] += 1
        ended = all(program and program[-1].kind == "STEP" and i == len(program) for i, program in zip(at, self.programs, strict=True))
        reduced = len(self.passed) == sum(len(ranks) for ranks in self.replica.values())
        return ended and reduced and not self.open and not self.unsent and not any(self.sent.values())

    def compute(self, rank: int, i: Instruction) -> bool:
        kind, section, replica, stage, micro = i[:5]
        job = (kind, section, micro, rank)
        if job not in self.open or self.needs[job] or i[5:] != _NO_MESSAGE:
            raise _Wrong
        if replica != self.replica[section][rank] or stage != self.stage[section]:
            raise _Wrong
        together = self.replicas[section][replica]
        in_step = self.rounds.get((section, micro))
        if in_step is not None:
            if not self._joined((kind, in_step[0]), rank, len(together) * len(in_step)):
                return False
        elif len(together) > 1 and not self._joined(i[:5], rank, len(together)):
            return False
        self.open.discard(job)
        for used in self.feeds.get(job, ()):
            self.needs[used] -= 1
        if kind != "F":
            self.left[section, rank] -= 1
        return True

    def _joined(self, what: object, rank: int, count: int) -> bool:
        """Whether all `count` ranks have reached what they do together; a rank that has to wait is woken by the last one."""
        self.reached[what].add(rank)
        if len(self.reached[what]) < count:
            self.waiting[what].append(rank)
            return False
        self.runnable += self.waiting.pop(what, ())
        return True

    def send(self, rank: int, i: Instruction) -> bool:
        edge, direction, peer, src, dst, *part = i[5:]
        made, _, which = found = self.unsent.pop((edge, direction, src, dst, rank, peer), _NOTHING)
        if which != tuple(part) or made in self.open or i[1:5] != _NO_COMPUTE:
            raise _Wrong
        channel = (edge, direction, rank, peer)
        self.sent[channel].append(((edge, direction, src, dst, rank, peer), found))
        if channel in self.waiting:
            self.runnable += self.waiting.pop(channel)
        return True

    def receive(self, rank: int, i: Instruction) -> bool:
        edge, direction, peer, src, dst, *part = i[5:]
        channel = (edge, direction, peer, rank)
        if not self.sent[channel]:
            self.waiting[channel].append(rank)
            return False
        key, (_, used, which) = self.sent[channel].popleft()
        if key != (edge, direction, src, dst, peer, rank) or which != tuple(part) or i[1:5] != _NO_COMPUTE:
            raise _Wrong
        self.needs[used] -= 1
        return True

    def reduce(self, rank: int, i: Instruction) -> bool:
        name, replica = i[1:3]
        ranks = self.replica.get(name, {})
        if ranks.get(rank) != replica or self.left[name, rank] or (name, rank) in self.passed or i[3:] != _NO_REST:
            raise _Wrong
        if not self._joined(name, rank, len(ranks)):
            return False
        self.passed.add((name, rank))
        return True


_NO_MESSAGE, _NO_COMPUTE, _NO_REST = ("", "", -1, -1, -1, 0, 1), ("", 0, 0, -1), (0, -1, "", "", -1, -1, -1, 0, 1)
_NOTHING: Link = (("", "", -1, -1), ("", "", -1, -1), (-1, -1))
