"""Simulates a step with a critical pipeline on its own ranks: each pipeline replica separately, then all
other sections.

Replicas of a pipeline with planned orders influence each other only through upstream sections, and mostly all
upstream forwards end before the first gradient returns. The planner (`pipeline_order`) has simulated the
replicas with estimated input times. Here the other sections are simulated (`list_scheduler`) with the ends of
the first stage's backwards as arrival times. If all inputs are ready when the replicas start them, their
timelines hold. Replicas with other input times are simulated again with the times found, and the other
sections after them. That costs a fraction of simulating all tasks together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from secc.runtime.plan.int_columns import int_tensor
from secc.runtime.plan.schema import Edge, Section
from secc.runtime.plan.step_program import returns_gradient
from secc.runtime.schedule.list_scheduler import simulate_tasks
from secc.runtime.schedule.micro_batches import MicroBatchComposer, MicroBatchTable
from secc.runtime.schedule.pipeline_order import PipelineLoad, PipelineOrders
from secc.runtime.schedule.pipeline_replica_sim import ReplicaTimeline
from secc.runtime.schedule.task_graph import MessagePairs, StepTasks, TaskRanges, build_step_tasks

DECOUPLED_ROUNDS = 4  # simulations of the other sections before giving up

TimedTasks = tuple[Tensor, Tensor, Tensor]  # tasks, their starts and durations in ns


@dataclass
class DecoupledSimulation:
    """The parts of a step: the `stages` of a pipeline, with replicas that keep to `orders`, and the other
    sections.

    `orders` also has the timelines of the replicas that the planner found.
    """

    composer: MicroBatchComposer
    tables: Mapping[str, MicroBatchTable]
    messages: MessagePairs
    task_ranges: Mapping[str, TaskRanges]
    stages: Sequence[Section]
    load: PipelineLoad
    orders: PipelineOrders
    stage_names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.stage_names = frozenset(s.name for s in self.stages)

    def simulate(self) -> tuple[list[int], int] | None:
        """Returns all tasks by start time, and the makespan in ns.

        Returns None if a section feeds a later stage directly, if only some stages have split backwards, or
        if the times do not settle within DECOUPLED_ROUNDS.
        """
        first, split = self.stages[0].name, bool(self.load.replica.weight_ns)
        if any(e.dst != first for e in self._incoming_edges()) or any(
            (self.task_ranges[s.name].weight_start >= 0) != split for s in self.stages
        ):
            return None
        others, arrivals = self._build_other_tasks()
        # Micro-batches are numbered replica after replica in their orders; `planned` are the planner's
        # numbers.
        planned = [m for order in self.orders.orders for m in order]
        timelines, assumed = self.orders.timelines.copy(), [self.orders.ready[m] for m in planned]
        for _ in range(DECOUPLED_ROUNDS):
            backward_ends = [end for timeline in timelines for end in timeline.backward_ends]
            for micro, arrival in arrivals.items():
                others.graph.duration_ns[arrival] = backward_ends[micro]
            simulated = simulate_tasks(others.graph)
            actual = self._input_ready_times(others, simulated.order, simulated.starts)
            changed = [
                r
                for r, micros in enumerate(self._replica_slices())
                if _changes_timing(timelines[r].starts, assumed[micros], actual[micros])
            ]
            if not changed:
                return self._merge_orders(others, simulated.order, simulated.starts, timelines)
            ready = [0] * len(planned)
            for position, m in enumerate(planned):
                ready[m] = actual[position]
            for r in changed:
                timelines[r] = self.load.replica.simulate(self.orders.orders[r], ready)
            assumed = actual
        return None

    def _incoming_edges(self) -> Iterator[Edge]:
        """Yields the edges from other sections into the pipeline."""
        return (
            e for e in self.composer.plan.edges if e.dst in self.stage_names and e.src not in self.stage_names
        )

    def _replica_slices(self) -> Iterator[slice]:
        """Yields the slice of each replica's micro-batches."""
        start = 0
        for order in self.orders.orders:
            yield slice(start, start := start + len(order))

    def _build_other_tasks(self) -> tuple[StepTasks, dict[int, int]]:
        """Builds the other sections' tasks, with an arrival task for each of the first stage's backwards that
        they wait for.

        Returns the tasks and micro-batch -> arrival task.
        """
        plan = self.composer.plan
        step = build_step_tasks(plan, self.composer.graph, self.tables, self.messages, (), self.stage_names)
        sections = {s.name: s for s in plan.sections}
        awaiting: dict[int, list[int]] = {}
        for edge in self._incoming_edges():
            if returns_gradient(edge, sections):
                for a, b in self.messages[edge.name]:
                    awaiting.setdefault(b, []).append(step.ranges[edge.src].backward_start + a)
        return step, {micro: step.graph.add_arrival(0, tasks) for micro, tasks in awaiting.items()}

    def _input_ready_times(self, others: StepTasks, order: Sequence[int], starts: Sequence[int]) -> list[int]:
        """Returns when each of the first stage's micro-batches has its inputs, in ns."""
        ends = [0] * len(order)
        for task, start in zip(order, starts, strict=True):
            ends[task] = start + others.graph.duration_ns[task]
        ready = [0] * len(self.load.work_ns)
        for edge in self._incoming_edges():
            forward = others.ranges[edge.src].forward_start
            for a, b in self.messages[edge.name]:
                ready[b] = max(ready[b], ends[forward + a])
        return ready

    def _merge_orders(
        self,
        others: StepTasks,
        order: Sequence[int],
        starts: Sequence[int],
        timelines: Sequence[ReplicaTimeline],
    ) -> tuple[list[int], int]:
        """Merges the parts into one order of all tasks and the makespan.

        Tasks without duration go before others that start at the same time. Two without duration stay in the
        order of `pieces`, where a task comes after every task that it may wait for.
        """
        pieces = [
            *self._time_other_tasks(others, order, starts, False),
            *self._time_stage_tasks(timelines),
            *self._time_other_tasks(others, order, starts, True),
        ]
        tasks, task_starts, durations = map(torch.cat, zip(*pieces, strict=True))
        by_start = torch.argsort(2 * task_starts + (durations > 0), stable=True)
        return tasks[by_start].tolist(), int((task_starts + durations).max()) if len(by_start) else 0

    def _time_other_tasks(
        self, others: StepTasks, order: Sequence[int], starts: Sequence[int], backward: bool
    ) -> Iterator[TimedTasks]:
        """Yields the other sections' forwards, or with `backward` their backwards and W parts, with their
        numbers in the whole step.
        """
        step_number = [-1] * len(others.graph.rank_of)
        for name, n in others.ranges.items():
            for k, (tasks, step_tasks) in enumerate(
                zip(n.ranges, self.task_ranges[name].ranges, strict=True)
            ):
                if (k > 0) == backward:
                    step_number[tasks.start : tasks.stop] = step_tasks
        timed = [
            (step_number[task], start, others.graph.duration_ns[task])
            for task, start in zip(order, starts, strict=True)
            if step_number[task] >= 0
        ]
        if timed:
            numbers, task_starts, durations = map(int_tensor, zip(*timed, strict=True))
            yield numbers, task_starts, durations

    def _time_stage_tasks(self, timelines: Sequence[ReplicaTimeline]) -> list[TimedTasks]:
        """Returns the stages' forwards (first stage first), their backwards (last stage first) and their W
        parts.

        The last stage runs a micro-batch's backward right after its forward, as one task.
        """
        replica, planned = self.load.replica, int_tensor(chain.from_iterable(self.orders.orders))
        stages = [(s, self.task_ranges[stage.name]) for s, stage in enumerate(self.stages)]

        def piece(start: int, times: Sequence[Sequence[int]], part: int, s: int) -> TimedTasks:
            durations = int_tensor(times[s])[planned]
            ends = int_tensor(chain.from_iterable(timeline.task_ends[part][s] for timeline in timelines))
            return torch.arange(start, start + len(planned)), ends - durations, durations

        forwards = [piece(task_ranges.forward_start, replica.forward_ns, 0, s) for s, task_ranges in stages]
        backwards = [
            piece(task_ranges.backward_start, replica.backward_ns, 1, s)
            for s, task_ranges in reversed(stages)
        ]
        tasks, task_starts, durations = forwards.pop()  # the last stage's tasks, which are both
        _, _, backward_durations = backwards.pop(0)
        forwards.append((tasks, task_starts, durations + backward_durations))
        return [
            *forwards,
            *backwards,
            *(
                piece(task_ranges.weight_start, replica.weight_ns, 2, s)
                for s, task_ranges in stages
                if replica.weight_ns
            ),
        ]


def _changes_timing(starts: Sequence[int], assumed: Sequence[int], actual: Sequence[int]) -> bool:
    """Returns whether a replica with these starts would wait longer, or less long, with the actual input
    times.
    """
    return any(
        now > start or now < before == start
        for start, before, now in zip(starts, assumed, actual, strict=True)
    )
