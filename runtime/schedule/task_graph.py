"""The tasks of a step: one for each forward and backward, or one for both where nothing can come between
them.

A section without consumers runs a micro-batch's backward right after its forward, so both are one task; this
halves the simulation time. A split backward has a further task for its W part (zero-bubble pipelines).

Priorities on a rank: backwards before forwards, since they free memory and upstream sections wait for them,
and downstream sections before upstream ones. Sections that run forwards first, because they feed sections on
other ranks, do all forwards before their backwards. W parts come last, because no other task waits for them.

The stages of a pipeline process micro-batches in the order of the first stage. A stage that holds as many as
it may between forward and backward starts no other forward: with a limit of one for itself and for each stage
after it, that is 1F1B. The same limit bounds what a section that runs forwards first holds for its consumers;
at the limit it runs backwards as they become possible. The limit is also in bytes, where large micro-batches
count for more.
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

MessagePairs = dict[
    str, list[tuple[int, int]]
]  # edge -> pairs of the producer's and the consumer's micro-batch


@dataclass(frozen=True)
class TaskRanges:
    """The task numbers of a section's `count` micro-batches.

    The forward of micro-batch m is task `forward_start + m`, its backward `backward_start + m`.
    `backward_start` is -1 without a backward, and equal to `forward_start` if one task does both.
    `weight_start` is the start of the W parts of split backwards, else -1.
    """

    section: Section
    count: int
    forward_start: int
    backward_start: int
    weight_start: int = -1

    @property
    def release_start(self) -> int:
        """Start of the tasks that release what a micro-batch saved in its forward; -1 without a backward."""
        return self.weight_start if self.weight_start >= 0 else self.backward_start

    @property
    def ranges(self) -> list[range]:
        """Task ranges of the forwards, the backwards and the W parts, as far as they exist."""
        return [
            range(start, start + self.count)
            for start in dict.fromkeys((self.forward_start, self.backward_start, self.weight_start))
            if start >= 0
        ]

    def micro_batch_tasks(self, micro: int) -> list[int]:
        """Returns the tasks of a micro-batch."""
        return [part[micro] for part in self.ranges]


@dataclass
class StepTasks:
    """The task graph of one global batch, and the task numbers of each section."""

    graph: TaskGraph
    ranges: dict[str, TaskRanges]


def number_tasks(
    plan: Plan, graph: SectionGraph, tables: Mapping[str, MicroBatchTable], without: Container[str] = ()
) -> dict[str, TaskRanges]:
    """Numbers the tasks of all sections but those in `without`."""
    producers, start = {e.src for e in plan.edges}, 0
    task_ranges: dict[str, TaskRanges] = {}
    for section in (s for s in graph.topological_order if s.name not in without):
        name, count = section.name, len(tables[section.name].micro_batches)
        forward = backward = start
        if not owes_backward(section):
            backward = -1
        elif name in producers:
            start = backward = start + count
        start += count
        weight = start if section.weight_permille and backward >= 0 else -1
        start += count if weight >= 0 else 0
        task_ranges[name] = TaskRanges(section, count, forward, backward, weight)
    return task_ranges


def build_step_tasks(
    plan: Plan,
    graph: SectionGraph,
    tables: Mapping[str, MicroBatchTable],
    messages: MessagePairs,
    in_order: Container[str],
    without: Container[str] = (),
    limited: Container[str] = (),
) -> StepTasks:
    """Builds the task graph of these micro-batches, with priorities.

    Replicas of the sections `in_order` run their forwards in the order of their micro-batches. Sections in
    `without` and their messages are left out. Those in `limited` keep to their bytes even if they may hold
    any number of micro-batches.
    """
    step = StepTasks(TaskGraph(plan.world_size), number_tasks(plan, graph, tables, without))
    extra_ranks = shared_extra_ranks(tuple(s.mesh for s in graph.topological_order))
    for task_ranges in step.ranges.values():
        _add_section_tasks(step, task_ranges, tables[task_ranges.section.name])
    for task_ranges in step.ranges.values():
        by_first_rank = extra_ranks.get(task_ranges.section.mesh, {})
        for tasks in task_ranges.ranges if by_first_rank else ():
            step.graph.occupy_ranks(tasks, by_first_rank)
    _add_dependencies(plan, step, messages)
    _chain_in_order(step, tables, in_order)
    step.graph.priority = _prioritize_tasks(graph, step, tables, in_order)
    for stages in plan.pipelines.values():
        if stages[0].name not in without:
            _bind_stages(step, tables, stages, limited)
    return step


def _bind_stages(
    step: StepTasks,
    tables: Mapping[str, MicroBatchTable],
    stages: Sequence[Section],
    limited: Container[str],
) -> None:
    """Binds the stages of a pipeline: one order of micro-batches, and their in-flight limits."""
    task_ranges = [step.ranges[s.name] for s in stages]
    for earlier, later in pairwise(task_ranges):
        first, second = (
            range(stage_tasks.forward_start, stage_tasks.forward_start + stage_tasks.count)
            for stage_tasks in (earlier, later)
        )
        for a, b in zip(first, second, strict=True):
            # Even without a message between them, for some samples or for all, a stage follows the one before
            # it.
            if b not in step.graph.successors[a]:
                step.graph.add_dependency(a, b)
        step.graph.follow_order(first, second)
    for section, stage_tasks in zip(stages, task_ranges, strict=True):
        is_limited = section.in_flight or section.name in limited
        if is_limited and stage_tasks.release_start not in (-1, stage_tasks.forward_start):
            takes, gives = (
                range(start, start + stage_tasks.count)
                for start in (stage_tasks.forward_start, stage_tasks.release_start)
            )
            table, between_from = tables[section.name], -1
            sizes, between = table.saved_bytes, table.between_bytes
            if between and stage_tasks.backward_start == stage_tasks.forward_start:
                sizes, between = list(map(int.__add__, sizes, between)), []
            elif between:
                between_from = stage_tasks.backward_start
            step.graph.limit_in_flight(
                section.in_flight or stage_tasks.count,
                takes,
                gives,
                section.room_bytes,
                sizes,
                range(between_from, between_from + len(between)),
                between,
            )


def _add_section_tasks(step: StepTasks, task_ranges: TaskRanges, table: MicroBatchTable) -> None:
    """Adds the tasks of a section, with the dependencies within a micro-batch and the rounds of ZeRO-3."""
    graph = step.graph
    ranks = replica_first_ranks(task_ranges.section)
    count = task_ranges.count
    section = task_ranges.section
    start, ranks_of_tasks = task_ranges.forward_start, [ranks[m.replica] for m in table.micro_batches]
    backward_without_weight = list(map(int.__sub__, table.backward_ns, table.weight_ns))
    if task_ranges.backward_start == start:
        parts = [list(map(int.__add__, table.forward_ns, backward_without_weight))]
    else:
        parts = (
            [table.forward_ns, backward_without_weight]
            if task_ranges.backward_start >= 0
            else [table.forward_ns]
        )
    parts += [table.weight_ns] if task_ranges.weight_start >= 0 else []
    for part, durations in enumerate(parts, 1):
        graph.rank_of += ranks_of_tasks
        graph.duration_ns += durations
        graph.successors += [
            [m + count] if part < len(parts) else []
            for m in range(len(graph.successors), len(graph.successors) + count)
        ]
        graph.predecessor_count += [int(part > 1)] * count
    for members in dict.fromkeys(gather_rounds([section], {section.name: table.micro_batches}).values()):
        for first in range(start, start + len(parts) * count, count):
            graph.join_tasks([first + m.index for m in members])
        # Replicas meet in the forward and again in the backward, and the longest forward and the longest
        # backward may belong to different replicas: a task that is both takes the sum of the two maxima.
        if task_ranges.backward_start == start:
            duration = sum(
                max(column[m.index] for m in members)
                for column in (table.forward_ns, backward_without_weight)
            )
            for m in members:
                graph.duration_ns[start + m.index] = duration


def _add_dependencies(plan: Plan, step: StepTasks, messages: MessagePairs) -> None:
    """Makes consumers' forwards wait for producers' forwards, and producers' backwards for consumers'
    backwards where a gradient returns.
    """
    sections = {s.name: s for s in plan.sections}
    successors, predecessor_count = step.graph.successors, step.graph.predecessor_count
    for edge in (e for e in plan.edges if e.src in step.ranges and e.dst in step.ranges):
        src, dst, gradient = step.ranges[edge.src], step.ranges[edge.dst], returns_gradient(edge, sections)
        for a, b in messages[edge.name]:
            successors[src.forward_start + a].append(dst.forward_start + b)
            predecessor_count[dst.forward_start + b] += 1
            if gradient:
                successors[dst.backward_start + b].append(src.backward_start + a)
                predecessor_count[src.backward_start + a] += 1


def _chain_in_order(step: StepTasks, tables: Mapping[str, MicroBatchTable], in_order: Container[str]) -> None:
    """Makes each replica of the sections `in_order` run its forwards in the order of their micro-batches."""
    for name, task_ranges in step.ranges.items():
        last_forward: dict[int, int] = {}
        for m in tables[name].micro_batches if name in in_order else ():
            if m.replica in last_forward:
                step.graph.add_dependency(last_forward[m.replica], task_ranges.forward_start + m.index)
            last_forward[m.replica] = task_ranges.forward_start + m.index


# -- priorities


# Bands of priorities, the most urgent first.
BAND_BACKWARD, BAND_FORWARD_FIRST, BAND_FORWARD, BAND_BACKWARD_LATER, BAND_WEIGHT = range(5)
_task_of_key = itemgetter(-1)


def _prioritize_tasks(
    graph: SectionGraph, step: StepTasks, tables: Mapping[str, MicroBatchTable], in_order: Container[str]
) -> IntColumn:
    """Returns the priority of each task: by band, mostly downstream sections first, then by key.

    Bands: backwards, forwards of sections that run forwards first, other forwards, backwards of the sections
    that run forwards first, W parts.
    """
    keys_by_band: defaultdict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)  # by (band, -depth)
    for name, task_ranges in step.ranges.items():
        table = tables[name]
        depth = -graph.depth[name]
        forwards_first = graph.runs_forwards_first(task_ranges.section)
        forward_band = (BAND_FORWARD_FIRST, 0) if forwards_first else (BAND_FORWARD, depth)
        holds_outputs = forwards_first or (
            task_ranges.section.in_flight > 0 and graph.receives_gradients(task_ranges.section)
        )
        keys_by_band[forward_band] += _forward_keys(task_ranges, table, holds_outputs, name in in_order)
        if task_ranges.backward_start not in (-1, task_ranges.forward_start):
            upstream_work = (
                list(map(int.__add__, table.upstream_ns, table.backward_ns))
                if forwards_first
                else table.upstream_ns
            )
            backward_band = (BAND_BACKWARD_LATER if forwards_first else BAND_BACKWARD), depth
            keys_by_band[backward_band] += zip(
                map(int.__neg__, upstream_work),
                _negated_work(table),
                range(task_ranges.backward_start, task_ranges.backward_start + task_ranges.count),
                strict=True,
            )
        if task_ranges.weight_start >= 0:
            keys_by_band[BAND_WEIGHT, 0] += zip(
                range(task_ranges.weight_start, task_ranges.weight_start + task_ranges.count)
            )
    priority = [0] * len(step.graph.rank_of)
    for position, task in enumerate(
        chain.from_iterable(map(_task_of_key, sorted(keys)) for _, keys in sorted(keys_by_band.items()))
    ):
        priority[task] = position
    return priority


def _forward_keys(
    task_ranges: TaskRanges, table: MicroBatchTable, holds_outputs: bool, in_order: bool
) -> Iterable[tuple[int, ...]]:
    """Returns the sort keys of a section's forwards, most urgent first; the last entry is the task.

    With `holds_outputs`, the section holds its outputs until other sections have used them, so it follows the
    critical start times: an in-flight budget full of inputs to many micro-batches would block the ones that
    it could complete.
    """
    tasks = range(task_ranges.forward_start, task_ranges.forward_start + task_ranges.count)
    if holds_outputs:
        return zip(table.critical_start_ns, _negated_work(table), tasks, strict=True)
    if in_order:
        return zip(table.critical_start_ns, tasks, strict=True)
    return zip(table.priority_class, table.urgency, _negated_work(table), tasks, strict=True)


def _negated_work(table: MicroBatchTable) -> list[int]:
    return [-f - b for f, b in zip(table.forward_ns, table.backward_ns, strict=True)]
