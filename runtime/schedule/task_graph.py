"""The jobs of a step: one for each forward and backward, or one for both where nothing can come between them.

A section that nothing consumes runs a micro-batch's backward right after its forward, so the two are one job:
the order takes half as long to compute. Where a backward is split, its second part is a job of its own. Which
job is more urgent on a rank: backwards before forwards, since they free memory and are awaited upstream, and
downstream sections before upstream ones; only sections that run *ahead*, because they feed sections on other
ranks, do all forwards first. The second parts of backwards, for which nobody waits, come last.

The stages of a pipeline pass micro-batches on in the order in which the first stage takes them, and a stage
that holds as many as it may between forward and backward starts no other forward: with a room of one for
itself and each stage behind it, that is 1F1B. The same bounds what a section that runs ahead holds for its
consumers: when its room is taken it does backwards as they become possible. The room is bytes of the rank's
memory, too, of which large micro-batches take more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter

from secc.runtime.plan.replica_routes import widths
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.section_graph import Graph
from secc.runtime.plan.step_program import owes_backward, replica_ranks, returns_gradient, rounds
from secc.runtime.schedule.list_scheduler import Jobs
from secc.runtime.schedule.micro_batches import Column, Table

Messages = dict[str, list[tuple[int, int]]]  # for each edge, (producer's, consumer's) micro-batch


@dataclass(frozen=True)
class Numbers:
    """Where the jobs of a section's `count` micro-batches stand.

    The forward of micro-batch m is job `forward + m`, its backward `backward + m`; `backward` is -1 where
    none is owed, and equal to `forward` where one job does both. `weight` is where the second parts of split
    backwards start, else -1.
    """

    section: Section
    count: int
    forward: int
    backward: int
    weight: int = -1

    @property
    def last(self) -> int:
        """Where the jobs start after which a micro-batch keeps nothing."""
        return self.weight if self.weight >= 0 else self.backward

    @property
    def parts(self) -> list[range]:
        """All jobs: forwards, backwards, and what backwards leave for later."""
        return [
            range(start, start + self.count)
            for start in dict.fromkeys((self.forward, self.backward, self.weight))
            if start >= 0
        ]

    def jobs(self, micro: int) -> list[int]:
        """The jobs of a micro-batch."""
        return [part[micro] for part in self.parts]


@dataclass
class Step:
    """The jobs of one global batch, without their priorities, and what each section's are."""

    jobs: Jobs
    numbers: dict[str, Numbers]


def numbered(
    plan: Plan, graph: Graph, tables: Mapping[str, Table], without: Container[str] = ()
) -> dict[str, Numbers]:
    """Where the jobs of each section stand, but of those `without`."""
    fed, start = {e.src for e in plan.edges}, 0
    numbers: dict[str, Numbers] = {}
    for section in (s for s in graph.order if s.name not in without):
        name, count = section.name, len(tables[section.name].micro_batches)
        forward = backward = start
        if not owes_backward(section):
            backward = -1
        elif name in fed:
            start = backward = start + count
        start += count
        weight = start if section.weight_permille and backward >= 0 else -1
        start += count if weight >= 0 else 0
        numbers[name] = Numbers(section, count, forward, backward, weight)
    return numbers


def make(
    plan: Plan,
    graph: Graph,
    tables: Mapping[str, Table],
    messages: Messages,
    in_turn: Container[str],
    without: Container[str] = (),
) -> Step:
    """The jobs of these micro-batches, with priorities. Replicas of sections `in_turn` run their forwards in
    the micro-batches' order.

    Sections `without` are left out, and what the others have to do with them.
    """
    step = Step(Jobs(plan.world_size), numbered(plan, graph, tables, without))
    wide = widths(tuple(s.mesh for s in graph.order))
    for n in step.numbers.values():
        _add(step, n, tables[n.section.name])
        others = wide.get(n.section.mesh, {})
        for part in n.parts if others else ():
            step.jobs.widen(part, others)
    _depend(plan, step, messages)
    _in_turn(step, tables, in_turn)
    step.jobs.priority = _priorities(graph, step, tables, in_turn)
    for stages in plan.pipelines.values():
        if stages[0].name not in without:
            _pass_on(step, tables, stages)
    return step


def _pass_on(step: Step, tables: Mapping[str, Table], stages: Sequence[Section]) -> None:
    """What binds the stages of a pipeline: one order of micro-batches, and room for so many in flight."""
    numbers = [step.numbers[s.name] for s in stages]
    for before, then in pairwise(numbers):
        first, second = (range(n.forward, n.forward + n.count) for n in (before, then))
        for a, b in zip(first, second, strict=True):
            if (
                b not in step.jobs.successors[a]
            ):  # nothing travels between these stages, for some samples or for all
                step.jobs.before(a, b)
        step.jobs.follow(first, second)
    for section, n in zip(stages, numbers, strict=True):
        if section.in_flight and n.last not in (-1, n.forward):
            takes, gives = (range(start, start + n.count) for start in (n.forward, n.last))
            step.jobs.limit(section.in_flight, takes, gives, section.room_bytes, tables[section.name].kept)


def _add(step: Step, n: Numbers, table: Table) -> None:
    jobs, ranks, count, section = step.jobs, replica_ranks(n.section), n.count, n.section
    start, where = n.forward, [ranks[m.replica] for m in table.micro_batches]
    inputs = list(map(int.__sub__, table.backward, table.weight))
    if n.backward == start:
        parts = [list(map(int.__add__, table.forward, inputs))]
    else:
        parts = [table.forward, inputs] if n.backward >= 0 else [table.forward]
    parts += [table.weight] if n.weight >= 0 else []
    for part, durations in enumerate(parts, 1):
        jobs.rank += where
        jobs.duration += durations
        jobs.successors += [
            [m + count] if part < len(parts) else []
            for m in range(len(jobs.successors), len(jobs.successors) + count)
        ]
        jobs.waits += [int(part > 1)] * count
    for of_round in dict.fromkeys(rounds([section], {section.name: table.micro_batches}).values()):
        for first in range(start, start + len(parts) * count, count):
            jobs.join([first + m.index for m in of_round])
        if (
            n.backward == start
            # replicas are in step in both, and the one with the longest forward may not have the longest backward
        ):
            lasts = sum(max(column[m.index] for m in of_round) for column in (table.forward, inputs))
            for m in of_round:
                jobs.duration[start + m.index] = lasts


def _depend(plan: Plan, step: Step, messages: Messages) -> None:
    """Consumers' forwards wait for producers', and producers' backwards for consumers' where a gradient
    returns."""
    sections, successors, waits = {s.name: s for s in plan.sections}, step.jobs.successors, step.jobs.waits
    for edge in (e for e in plan.edges if e.src in step.numbers and e.dst in step.numbers):
        src, dst, gradient = step.numbers[edge.src], step.numbers[edge.dst], returns_gradient(edge, sections)
        for a, b in messages[edge.name]:
            successors[src.forward + a].append(dst.forward + b)
            waits[dst.forward + b] += 1
            if gradient:
                successors[dst.backward + b].append(src.backward + a)
                waits[src.backward + a] += 1


def _in_turn(step: Step, tables: Mapping[str, Table], some: Container[str]) -> None:
    for name, numbers in step.numbers.items():
        last: dict[int, int] = {}
        for m in tables[name].micro_batches if name in some else ():
            if m.replica in last:
                step.jobs.before(last[m.replica], numbers.forward + m.index)
            last[m.replica] = numbers.forward + m.index


# -- priorities
# -------------------------------------------------------------------------------------------------------------------


BACKWARD, AHEAD, FORWARD, BACKWARD_AHEAD, WEIGHT = range(5)  # bands, the most urgent first
_job = itemgetter(-1)


def _priorities(graph: Graph, step: Step, tables: Mapping[str, Table], in_turn: Container[str]) -> Column:
    """Each job's place in the order of urgency: by bands, in most of which downstream sections go first, then
    by keys, the job the last.

    Bands: backwards, forwards that run ahead, forwards, backwards of those ahead, and what nobody waits for:
    the second parts of backwards.
    """
    found: defaultdict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)  # keys by band and depth
    for name, n in step.numbers.items():
        table, depth, ahead = tables[name], -graph.depth[name], graph.runs_ahead(n.section)
        early = (AHEAD, 0) if ahead else (FORWARD, depth)
        held = ahead or (n.section.in_flight > 0 and graph.is_owed(n.section))
        found[early] += _forward_keys(n, table, held, name in in_turn)
        if n.backward not in (-1, n.forward):
            owed = list(map(int.__add__, table.upstream, table.backward)) if ahead else table.upstream
            late = (BACKWARD_AHEAD if ahead else BACKWARD), depth
            found[late] += zip(
                map(int.__neg__, owed), _sizes(table), range(n.backward, n.backward + n.count), strict=True
            )
        if n.weight >= 0:
            found[WEIGHT, 0] += zip(range(n.weight, n.weight + n.count))
    priority = [0] * len(step.jobs.rank)
    for place, job in enumerate(
        chain.from_iterable(map(_job, sorted(keys)) for _, keys in sorted(found.items()))
    ):
        priority[job] = place
    return priority


def _forward_keys(n: Numbers, table: Table, held: bool, in_turn: bool) -> Iterable[tuple[int, ...]]:
    """`held`: the section holds what it has done until other sections have done theirs, which want it by
    turn. Room that is full of parts of several of their micro-batches would wait for what has no room."""
    jobs = range(n.forward, n.forward + n.count)
    if held:
        return zip(table.turn, _sizes(table), jobs, strict=True)
    if in_turn:
        return zip(table.turn, jobs, strict=True)
    return zip(table.wave, table.urgency, _sizes(table), jobs, strict=True)


def _sizes(table: Table) -> list[int]:
    return [-f - b for f, b in zip(table.forward, table.backward, strict=True)]
