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

from secc.runtime.plan.replica_routes import shared_extra_ranks
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import gather_rounds, owes_backward, replica_first_ranks, returns_gradient
from secc.runtime.schedule.list_scheduler import TaskGraph
from secc.runtime.schedule.micro_batches import IntColumn, MicroBatchTable

MessagePairs = dict[str, list[tuple[int, int]]]  # for each edge, (producer's, consumer's) micro-batch


@dataclass(frozen=True)
class TaskRanges:
    """Where the jobs of a section's `count` micro-batches stand.

    The forward of micro-batch m is job `forward + m`, its backward `backward + m`; `backward` is -1 where
    none is owed, and equal to `forward` where one job does both. `weight` is where the second parts of split
    backwards start, else -1.
    """

    section: Section
    count: int
    forward_start: int
    backward_start: int
    weight_start: int = -1

    @property
    def release_start(self) -> int:
        """Where the jobs start after which a micro-batch keeps nothing."""
        return self.weight_start if self.weight_start >= 0 else self.backward_start

    @property
    def ranges(self) -> list[range]:
        """All jobs: forwards, backwards, and what backwards leave for later."""
        return [
            range(start, start + self.count)
            for start in dict.fromkeys((self.forward_start, self.backward_start, self.weight_start))
            if start >= 0
        ]

    def micro_batch_tasks(self, micro: int) -> list[int]:
        """The jobs of a micro-batch."""
        return [part[micro] for part in self.ranges]


@dataclass
class StepTasks:
    """The jobs of one global batch, without their priorities, and what each section's are."""

    graph: TaskGraph
    ranges: dict[str, TaskRanges]


def number_tasks(
    plan: Plan, graph: SectionGraph, tables: Mapping[str, MicroBatchTable], without: Container[str] = ()
) -> dict[str, TaskRanges]:
    """Where the jobs of each section stand, but of those `without`."""
    fed, start = {e.src for e in plan.edges}, 0
    numbers: dict[str, TaskRanges] = {}
    for section in (s for s in graph.topological_order if s.name not in without):
        name, count = section.name, len(tables[section.name].micro_batches)
        forward = backward = start
        if not owes_backward(section):
            backward = -1
        elif name in fed:
            start = backward = start + count
        start += count
        weight = start if section.weight_permille and backward >= 0 else -1
        start += count if weight >= 0 else 0
        numbers[name] = TaskRanges(section, count, forward, backward, weight)
    return numbers


def build_step_tasks(
    plan: Plan,
    graph: SectionGraph,
    tables: Mapping[str, MicroBatchTable],
    messages: MessagePairs,
    in_turn: Container[str],
    without: Container[str] = (),
) -> StepTasks:
    """The jobs of these micro-batches, with priorities. Replicas of sections `in_turn` run their forwards in
    the micro-batches' order.

    Sections `without` are left out, and what the others have to do with them.
    """
    step = StepTasks(TaskGraph(plan.world_size), number_tasks(plan, graph, tables, without))
    wide = shared_extra_ranks(tuple(s.mesh for s in graph.topological_order))
    for n in step.ranges.values():
        _add_section_tasks(step, n, tables[n.section.name])
        others = wide.get(n.section.mesh, {})
        for part in n.ranges if others else ():
            step.graph.occupy_ranks(part, others)
    _add_dependencies(plan, step, messages)
    _chain_in_order(step, tables, in_turn)
    step.graph.priority = _prioritize_tasks(graph, step, tables, in_turn)
    for stages in plan.pipelines.values():
        if stages[0].name not in without:
            _bind_stages(step, tables, stages)
    return step


def _bind_stages(step: StepTasks, tables: Mapping[str, MicroBatchTable], stages: Sequence[Section]) -> None:
    """What binds the stages of a pipeline: one order of micro-batches, and room for so many in flight."""
    numbers = [step.ranges[s.name] for s in stages]
    for before, then in pairwise(numbers):
        first, second = (range(n.forward_start, n.forward_start + n.count) for n in (before, then))
        for a, b in zip(first, second, strict=True):
            if (
                b not in step.graph.successors[a]
            ):  # nothing travels between these stages, for some samples or for all
                step.graph.add_dependency(a, b)
        step.graph.follow_order(first, second)
    for section, n in zip(stages, numbers, strict=True):
        if section.in_flight and n.release_start not in (-1, n.forward_start):
            takes, gives = (range(start, start + n.count) for start in (n.forward_start, n.release_start))
            step.graph.limit_in_flight(
                section.in_flight, takes, gives, section.room_bytes, tables[section.name].saved_bytes
            )


def _add_section_tasks(step: StepTasks, n: TaskRanges, table: MicroBatchTable) -> None:
    jobs, ranks, count, section = step.graph, replica_first_ranks(n.section), n.count, n.section
    start, where = n.forward_start, [ranks[m.replica] for m in table.micro_batches]
    inputs = list(map(int.__sub__, table.backward_ns, table.weight_ns))
    if n.backward_start == start:
        parts = [list(map(int.__add__, table.forward_ns, inputs))]
    else:
        parts = [table.forward_ns, inputs] if n.backward_start >= 0 else [table.forward_ns]
    parts += [table.weight_ns] if n.weight_start >= 0 else []
    for part, durations in enumerate(parts, 1):
        jobs.rank_of += where
        jobs.duration_ns += durations
        jobs.successors += [
            [m + count] if part < len(parts) else []
            for m in range(len(jobs.successors), len(jobs.successors) + count)
        ]
        jobs.predecessor_count += [int(part > 1)] * count
    for of_round in dict.fromkeys(gather_rounds([section], {section.name: table.micro_batches}).values()):
        for first in range(start, start + len(parts) * count, count):
            jobs.join_tasks([first + m.index for m in of_round])
        if (
            n.backward_start == start
            # replicas are in step in both, and the one with the longest forward may not have the longest backward
        ):
            lasts = sum(max(column[m.index] for m in of_round) for column in (table.forward_ns, inputs))
            for m in of_round:
                jobs.duration_ns[start + m.index] = lasts


def _add_dependencies(plan: Plan, step: StepTasks, messages: MessagePairs) -> None:
    """Consumers' forwards wait for producers', and producers' backwards for consumers' where a gradient
    returns."""
    sections, successors, waits = (
        {s.name: s for s in plan.sections},
        step.graph.successors,
        step.graph.predecessor_count,
    )
    for edge in (e for e in plan.edges if e.src in step.ranges and e.dst in step.ranges):
        src, dst, gradient = step.ranges[edge.src], step.ranges[edge.dst], returns_gradient(edge, sections)
        for a, b in messages[edge.name]:
            successors[src.forward_start + a].append(dst.forward_start + b)
            waits[dst.forward_start + b] += 1
            if gradient:
                successors[dst.backward_start + b].append(src.backward_start + a)
                waits[src.backward_start + a] += 1


def _chain_in_order(step: StepTasks, tables: Mapping[str, MicroBatchTable], some: Container[str]) -> None:
    for name, numbers in step.ranges.items():
        last: dict[int, int] = {}
        for m in tables[name].micro_batches if name in some else ():
            if m.replica in last:
                step.graph.add_dependency(last[m.replica], numbers.forward_start + m.index)
            last[m.replica] = numbers.forward_start + m.index


# -- priorities
# -------------------------------------------------------------------------------------------------------------------


BAND_BACKWARD, BAND_FORWARD_FIRST, BAND_FORWARD, BAND_BACKWARD_LATER, BAND_WEIGHT = range(
    5
)  # bands, the most urgent first
_task_of_key = itemgetter(-1)


def _prioritize_tasks(
    graph: SectionGraph, step: StepTasks, tables: Mapping[str, MicroBatchTable], in_turn: Container[str]
) -> IntColumn:
    """Each job's place in the order of urgency: by bands, in most of which downstream sections go first, then
    by keys, the job the last.

    Bands: backwards, forwards that run ahead, forwards, backwards of those ahead, and what nobody waits for:
    the second parts of backwards.
    """
    found: defaultdict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)  # keys by band and depth
    for name, n in step.ranges.items():
        table, depth, ahead = tables[name], -graph.depth[name], graph.runs_forwards_first(n.section)
        early = (BAND_FORWARD_FIRST, 0) if ahead else (BAND_FORWARD, depth)
        held = ahead or (n.section.in_flight > 0 and graph.receives_gradients(n.section))
        found[early] += _forward_keys(n, table, held, name in in_turn)
        if n.backward_start not in (-1, n.forward_start):
            owed = (
                list(map(int.__add__, table.upstream_ns, table.backward_ns)) if ahead else table.upstream_ns
            )
            late = (BAND_BACKWARD_LATER if ahead else BAND_BACKWARD), depth
            found[late] += zip(
                map(int.__neg__, owed),
                _negated_work(table),
                range(n.backward_start, n.backward_start + n.count),
                strict=True,
            )
        if n.weight_start >= 0:
            found[BAND_WEIGHT, 0] += zip(range(n.weight_start, n.weight_start + n.count))
    priority = [0] * len(step.graph.rank_of)
    for place, job in enumerate(
        chain.from_iterable(map(_task_of_key, sorted(keys)) for _, keys in sorted(found.items()))
    ):
        priority[job] = place
    return priority


def _forward_keys(
    n: TaskRanges, table: MicroBatchTable, held: bool, in_turn: bool
) -> Iterable[tuple[int, ...]]:
    """`held`: the section holds what it has done until other sections have done theirs, which want it by
    turn. Room that is full of parts of several of their micro-batches would wait for what has no room."""
    jobs = range(n.forward_start, n.forward_start + n.count)
    if held:
        return zip(table.critical_start_ns, _negated_work(table), jobs, strict=True)
    if in_turn:
        return zip(table.critical_start_ns, jobs, strict=True)
    return zip(table.priority_class, table.urgency, _negated_work(table), jobs, strict=True)


def _negated_work(table: MicroBatchTable) -> list[int]:
    return [-f - b for f, b in zip(table.forward_ns, table.backward_ns, strict=True)]
