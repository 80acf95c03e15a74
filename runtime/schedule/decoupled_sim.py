"""A step whose critical pipeline has ranks of its own, in virtual time: each of its replicas alone, and
beside them the other sections.

Replicas of a pipeline that keep to their queues have nothing to do with each other but through upstream, and
mostly that is all done forward before the first backward comes back. So the passages that the planner
(`queues`) has found with a guess of upstream's times hold if upstream, run by `timeline` with the ends of the
first stage's backwards as times that it waits for, has all there when it starts. The replicas for which it
does not are run again with the times found, and upstream after them. That is the whole step at a fraction of
what running all jobs together takes.
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
from secc.runtime.schedule.list_scheduler import simulate_with_starts
from secc.runtime.schedule.micro_batches import MicroBatchComposer, MicroBatchTable
from secc.runtime.schedule.pipeline_order import PipelineLoad, PipelineOrders
from secc.runtime.schedule.pipeline_replica_sim import ReplicaTimeline
from secc.runtime.schedule.task_graph import MessagePairs, StepTasks, TaskRanges, build_step_tasks

DECOUPLED_ROUNDS = 4  # runs of upstream before the step is left to `timeline`

TimedTasks = tuple[Tensor, Tensor, Tensor]  # jobs, when they start, how long they take


@dataclass
class DecoupledSimulation:
    """The parts of a step: a pipeline's `stages`, whose replicas take the queues of `plan` as they stand, and
    the other sections."""

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
        """All jobs in the order in which they start, and when the last one ends.

        None where the parts depend on each other in other ways, stages are not split alike, or their times do
        not settle.
        """
        first, split = self.stages[0].name, bool(self.load.replica.weight_ns)
        if any(e.dst != first for e in self._incoming_edges()) or any(
            (self.task_ranges[s.name].weight_start >= 0) != split for s in self.stages
        ):
            return None
        beside, arrivals = self._build_other_tasks()
        passages, wanted = self.orders.timelines.copy(), [m for queue in self.orders.orders for m in queue]
        guess = [self.orders.ready[m] for m in wanted]
        for _ in range(DECOUPLED_ROUNDS):
            backs = [back for passage in passages for back in passage.backward_ends]
            for micro, job in arrivals.items():
                beside.graph.duration_ns[job] = backs[micro]
            order, starts = simulate_with_starts(beside.graph)
            there = self._input_ready_times(beside, order, starts)
            late = [
                r
                for r, some in enumerate(self._replica_slices())
                if _changes_timing(passages[r].starts, guess[some], there[some])
            ]
            if not late:
                return self._merge_orders(beside, order, starts, passages)
            ready = [0] * len(wanted)
            for place, m in enumerate(wanted):
                ready[m] = there[place]
            for r in late:
                passages[r] = self.load.replica.simulate(self.orders.orders[r], ready)
            guess = there
        return None

    def _incoming_edges(self) -> Iterator[Edge]:
        """The edges from other sections into the pipeline."""
        return (
            e for e in self.composer.plan.edges if e.dst in self.stage_names and e.src not in self.stage_names
        )

    def _replica_slices(self) -> Iterator[slice]:
        """Where the micro-batches of each replica stand."""
        start = 0
        for queue in self.orders.orders:
            yield slice(start, start := start + len(queue))

    def _build_other_tasks(self) -> tuple[StepTasks, dict[int, int]]:
        """The other sections' jobs, and for each of the first stage's micro-batches the job that stands for
        the end of its backward."""
        plan = self.composer.plan
        step, sections = (
            build_step_tasks(plan, self.composer.graph, self.tables, self.messages, (), self.stage_names),
            {s.name: s for s in plan.sections},
        )
        awaiting: dict[int, list[int]] = {}
        for edge in self._incoming_edges():
            if returns_gradient(edge, sections):
                for a, b in self.messages[edge.name]:
                    awaiting.setdefault(b, []).append(step.ranges[edge.src].backward_start + a)
        return step, {micro: step.graph.add_arrival(0, jobs) for micro, jobs in awaiting.items()}

    def _input_ready_times(self, beside: StepTasks, order: Sequence[int], starts: Sequence[int]) -> list[int]:
        """When the first stage's micro-batches have what they need."""
        ends = [0] * len(order)
        for job, start in zip(order, starts, strict=True):
            ends[job] = start + beside.graph.duration_ns[job]
        found = [0] * len(self.load.work_ns)
        for edge in self._incoming_edges():
            forward = beside.ranges[edge.src].forward_start
            for a, b in self.messages[edge.name]:
                found[b] = max(found[b], ends[forward + a])
        return found

    def _merge_orders(
        self,
        beside: StepTasks,
        order: Sequence[int],
        starts: Sequence[int],
        passages: Sequence[ReplicaTimeline],
    ) -> tuple[list[int], int]:
        """One order of all jobs. What takes no time goes before what starts at the same time, and where both
        take none, what may wait for the other comes second."""
        pieces = [
            *self._time_other_tasks(beside, order, starts, False),
            *self._time_stage_tasks(passages),
            *self._time_other_tasks(beside, order, starts, True),
        ]
        jobs, begun, lasts = map(torch.cat, zip(*pieces, strict=True))
        at = torch.argsort(2 * begun + (lasts > 0), stable=True)
        return jobs[at].tolist(), int((begun + lasts).max()) if len(at) else 0

    def _time_other_tasks(
        self, beside: StepTasks, order: Sequence[int], starts: Sequence[int], backward: bool
    ) -> Iterator[TimedTasks]:
        """The jobs of the other sections in their order, with their numbers among all: forwards, or what
        comes behind these."""
        number = [-1] * len(beside.graph.rank_of)
        for name, n in beside.ranges.items():
            for k, (some, own) in enumerate(zip(n.ranges, self.task_ranges[name].ranges, strict=True)):
                if (k > 0) == backward:
                    number[some.start : some.stop] = own
        chosen = [
            (number[job], start, beside.graph.duration_ns[job])
            for job, start in zip(order, starts, strict=True)
            if number[job] >= 0
        ]
        if chosen:
            jobs, begun, lasts = map(int_tensor, zip(*chosen, strict=True))
            yield jobs, begun, lasts

    def _time_stage_tasks(self, passages: Sequence[ReplicaTimeline]) -> list[TimedTasks]:
        """The stages' forwards, the first stage's first, then their backwards, the last stage's first, then
        the second parts of these.

        The last stage runs a micro-batch's backward right after its forward.
        """
        lane, wanted = self.load.replica, int_tensor(chain.from_iterable(self.orders.orders))
        stages = [(s, self.task_ranges[stage.name]) for s, stage in enumerate(self.stages)]

        def piece(start: int, times: Sequence[Sequence[int]], part: int, s: int) -> TimedTasks:
            lasts = int_tensor(times[s])[wanted]
            ends = int_tensor(chain.from_iterable(passage.task_ends[part][s] for passage in passages))
            return torch.arange(start, start + len(wanted)), ends - lasts, lasts

        forwards = [piece(n.forward_start, lane.forward_ns, 0, s) for s, n in stages]
        backwards = [piece(n.backward_start, lane.backward_ns, 1, s) for s, n in reversed(stages)]
        (jobs, begun, lasts), (_, _, then) = (
            forwards.pop(),
            backwards.pop(0),
        )  # the last stage's jobs are both
        forwards.append((jobs, begun, lasts + then))
        return [
            *forwards,
            *backwards,
            *(piece(n.weight_start, lane.weight_ns, 2, s) for s, n in stages if lane.weight_ns),
        ]


def _changes_timing(starts: Sequence[int], guess: Sequence[int], there: Sequence[int]) -> bool:
    """Whether a queue that was run with a guess of when things are there would wait longer, or less long."""
    return any(t > start or t < g == start for start, g, t in zip(starts, guess, there, strict=True))
