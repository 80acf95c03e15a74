"""The wavefront order: in which order the samples of one global batch pass through the sections' replicas.

The aim is a critical section that never waits: it starts with samples that need no upstream section while the
encoders fill, follows readiness, prefers what owes an upstream backward, and so ends with samples that owe
none while the encoders drain.

1. *Dealing* (`compose`, `lots`). What needs upstream is dealt first, largest first, each to the least loaded
  replica, then the rest: every
   replica gets its share of both, and they end together. Where micro-batches hold several samples, alike ones
   are together.
2. *Urgency* (`jobs`). Each replica of the critical section wants its samples in a queue: those that owe
  upstream the most first. A
   sample's turn is the work before it in that queue, and upstream sections take samples by turn, all forwards
   first, then backwards, the largest first; the others run a backward as soon as they can, which frees memory
   soonest. Where the critical section is a pipeline, its replicas' queues are planned instead (`queues`,
   `upstream`), with long micro-batches on few replicas.
3. *Virtual time* (`timeline`). Every rank, whenever it is free, takes the most urgent job that is ready;
  replicas of a pipeline that keep
   to their queues are run by themselves (`lane`), and the others beside them (`apart`). Where the time that
   this takes is not close to the work spread evenly, other styles of queue are tried, and then small changes
   (`search`), as long as the step is worth it.
4. *Programs* (`emit`) follow that one global order, which is why they cannot deadlock: each job waits only
  for jobs before it.
5. *Running ahead* (`ahead`). Where the plan has memory for it, frozen sections upstream compute their first
  micro-batches in the step
   before; in virtual time these take none.

Invariants: a micro-batch holds samples of one pattern; a sample stays on its rank through sections on the
same ranks; the same input gives the same programs on any machine, because everything is integers: Python's,
and for sorting torch's.

Where it loses: without running ahead, a step in which a frozen section upstream is as loaded as the critical
one ends later by up to the largest sample (whether another order within one step could do better is open);
encoders with a few images each cannot be level; a job is never held back for a more urgent one that is about
to be ready; transfers are not modelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from secc.runtime.host.gc_control import pause_gc
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import MicroBatchSets, SampleMeta, Schedule, micro_batch_pairs
from secc.runtime.schedule import pipeline_order
from secc.runtime.schedule.batch_packing import AssignedMicroBatches, SamplePositions
from secc.runtime.schedule.cross_step_prefetch import select_prefetched, without_prefetched_time
from secc.runtime.schedule.decoupled_sim import DecoupledSimulation
from secc.runtime.schedule.emit_programs import emit_programs
from secc.runtime.schedule.list_scheduler import simulate_tasks
from secc.runtime.schedule.micro_batches import MicroBatchComposer, MicroBatchTable
from secc.runtime.schedule.order_search import MakespanBound, affordable_runs, improve_order, worthwhile_tries
from secc.runtime.schedule.task_graph import MessagePairs, StepTasks, build_step_tasks, number_tasks
from secc.runtime.schedule.upstream_estimate import critical_pipeline_load

SCHEDULE_ORDERS = ("wavefront", "dataset")
PRIORITY_RULE_TRIES = 8  # what a style takes, in tries of the search
# what other queues of a pipeline take, of which every move looks at all that upstream does: more with many
# replicas
PIPELINE_ORDER_TRIES = 6
UNREACHABLE_NS = 1 << 62  # ns, as the time that no order can beat


@dataclass
class ScheduleCandidate:
    """A way to run the step: its micro-batches, those that the step before may compute, and the sections
    whose replicas run their forwards in the micro-batches' order; the messages between micro-batches, and
    where their jobs stand; the order in which the jobs start, and how long that takes."""

    composer: MicroBatchComposer
    tables: dict[str, MicroBatchTable]
    prefetchable: MicroBatchSets
    in_order_sections: Container[str] = ()
    task_order: list[int] = field(default_factory=list[int])
    makespan: int = 0

    def __post_init__(self) -> None:
        micros = Schedule({name: t.micro_batches for name, t in self.tables.items()}, ())
        whole = {
            s.name: s.user_section_name for s in self.composer.plan.sections
        }  # stages have the same micro-batches
        self.messages: MessagePairs = {
            e.name: [(m.index, m.index) for m in self.tables[e.src].micro_batches if m.samples]
            if whole[e.src] == whole[e.dst]
            else sorted(micro_batch_pairs(e, micros))
            for e in self.composer.plan.edges
        }
        self.task_ranges = number_tasks(self.composer.plan, self.composer.graph, self.tables)
        self.task_count = sum(len(part) for n in self.task_ranges.values() for part in n.ranges)

    @cached_property
    def step_tasks(self) -> StepTasks:
        """The jobs, which take a while to make and not every order needs."""
        return build_step_tasks(
            self.composer.plan, self.composer.graph, self.tables, self.messages, self.in_order_sections
        )


def schedule_batch(plan: Plan, samples: Sequence[SampleMeta], *, order: str = "wavefront") -> Schedule:
    """Micro-batches and programs of one global batch, `samples` in their order in the batch.

    `order="dataset"` takes the samples as they come, without balancing or reordering (to compare with).
    Raises ValueError for a plan whose sections cannot be ordered or whose costs cannot be evaluated.
    """
    return schedule_with_makespan(plan, samples, order=order)[0]


class ScheduleCache:
    """`schedule` for one plan. The last ones are kept, because a step may be ordered before its samples are
    loaded and again after, and for the step before it, which may run ahead; and because steps may be alike:
    where all samples are, every step has one schedule."""

    def __init__(self, plan: Plan, order: str) -> None:
        self._plan, self._order = plan, order
        self._recent: deque[tuple[list[object], Schedule]] = deque(maxlen=4 if plan.run_ahead_gib > 0 else 2)

    def __call__(self, samples: Sequence[SampleMeta]) -> Schedule:
        """The schedule of a global batch; the same object for one whose samples have the same patterns and
        sizes."""
        wanted: list[object] = [(s.pattern, s.sizes) for s in samples]
        for known, found in self._recent:
            if known == wanted:
                return found
        self._recent.append((wanted, schedule_batch(self._plan, samples, order=self._order)))
        return self._recent[-1][1]


def schedule_with_makespan(
    plan: Plan, samples: Sequence[SampleMeta], *, order: str = "wavefront"
) -> tuple[Schedule, int]:
    """`schedule`, and the nanoseconds it takes by the plan's costs, without transfers and the optimizer."""
    if order not in SCHEDULE_ORDERS:
        raise ValueError(f"unknown order {order!r}: one of {', '.join(SCHEDULE_ORDERS)}")
    with pause_gc():
        return _schedule_with_makespan(plan, samples, order)


def find_candidate(plan: Plan, samples: Sequence[SampleMeta], *, soon: bool = False) -> ScheduleCandidate:
    """The order that `schedule` makes programs of; with `soon` the first of those that it tries, which takes
    a part of the time."""
    with pause_gc():
        composer = MicroBatchComposer(plan, samples, SectionGraph(plan))
        return _find_candidate(
            composer, (lambda: UNREACHABLE_NS) if soon else cache(composer.makespan_lower_bound)
        )


class FixedSchedule:
    """The step of micro-batches that are given, each section's replicas taking theirs in the order in which
    they stand in `cuts`.

    `cuts` is by whole sections; stages of a pipeline share theirs. Sections in `ahead` do all forwards first,
    the others a backward as soon as they can; nothing is computed ahead of the step. Raises ValueError where
    the micro-batches wait for each other in a circle.
    """

    def __init__(
        self,
        plan: Plan,
        samples: Sequence[SampleMeta],
        cuts: Mapping[str, AssignedMicroBatches],
        ahead: Iterable[str] = (),
    ) -> None:
        plan = replace(plan, run_ahead_gib=0.0)
        with pause_gc():
            composer = MicroBatchComposer(plan, samples, SectionGraph(plan, frozenset(ahead)))
            tables: dict[str, MicroBatchTable] = {}
            for s in plan.sections:
                turn = [0] * len(samples)
                for place, (_, positions) in enumerate(cuts[s.user_section_name]):
                    for p in positions:
                        turn[p] = place
                tables[s.name] = composer.build_table(s, cuts[s.user_section_name], turn)
            self._candidate = _build_candidate(composer, tables, tables)

    @property
    def makespan(self) -> int:
        """Ns by the plan's costs, without transfers and the optimizer."""
        return self._candidate.makespan

    def emit_schedule(self) -> Schedule:
        """Its programs."""
        with pause_gc():
            return _emit_candidate(self._candidate)


def _schedule_with_makespan(plan: Plan, samples: Sequence[SampleMeta], order: str) -> tuple[Schedule, int]:
    composer = MicroBatchComposer(plan, samples, SectionGraph(plan))
    if order == "dataset":
        tables = composer.compose_in_dataset_order()
        found = _build_candidate(composer, tables, tables)
        return _emit_candidate(found), found.makespan
    best = _find_candidate(composer, cache(composer.makespan_lower_bound))
    return _emit_candidate(best), best.makespan


def _find_candidate(composer: MicroBatchComposer, least: MakespanBound) -> ScheduleCandidate:
    """The shortest order found; `least` tells a time in ns that none can beat, which bounds what looking for
    others is worth."""
    best = _try_candidates(composer, least)
    if count := worthwhile_tries(best.task_count, best.makespan, least) // (
        2 if best.in_order_sections else 1
    ):  # queues took the other half
        found = best.task_order, best.makespan
        best.tables, (best.task_order, best.makespan) = improve_order(
            best.step_tasks, composer.graph, best.tables, best.prefetchable, found, count
        )
    return best


def _try_candidates(composer: MicroBatchComposer, least: MakespanBound) -> ScheduleCandidate:
    """The shortest of the candidates; the later ones are tried only where there is something to gain."""
    if (found := critical_pipeline_load(composer)) is not None:
        return _try_pipeline_orders(composer, *found, least)
    first, *others = composer.list_priority_rules()
    best = _build_candidate(composer, composer.compose_by_priority(first))
    for style in others:
        if worthwhile_tries(best.task_count, best.makespan, least) < PRIORITY_RULE_TRIES:
            break
        found = _build_candidate(composer, composer.compose_by_priority(style))
        best = found if found.makespan < best.makespan else best
    return best


def _try_pipeline_orders(
    composer: MicroBatchComposer,
    load: pipeline_order.PipelineLoad,
    lots: Sequence[SamplePositions],
    least: MakespanBound,
) -> ScheduleCandidate:
    """A critical pipeline's queues: planned in the likeliest manner first, in others and with moves as long
    as the step is worth it."""
    plan, spent = pipeline_order.plan_orders(load, pipeline_order.LIKELIEST_STRATEGY), 0
    best = pipeline_order_candidate(composer, load, lots, plan)
    for manner in pipeline_order.OTHER_STRATEGIES:
        spent += PIPELINE_ORDER_TRIES * (1 + load.replica_count // pipeline_order.MAX_SIMULATED_REPLICAS)
        if not affordable_runs(best.task_count, best.makespan, least, spent):
            break
        other = pipeline_order.improve_last_order(load, pipeline_order.plan_orders(load, manner))
        found = pipeline_order_candidate(composer, load, lots, other)
        best, plan = (found, other) if found.makespan < best.makespan else (best, plan)
    if count := worthwhile_tries(best.task_count, best.makespan, least):
        found = pipeline_order_candidate(
            composer, load, lots, pipeline_order.search_orders(load, plan, count // 2)
        )
        best = found if found.makespan < best.makespan else best
    return best


def pipeline_order_candidate(
    composer: MicroBatchComposer,
    load: pipeline_order.PipelineLoad,
    lots: Sequence[SamplePositions],
    plan: pipeline_order.PipelineOrders,
) -> ScheduleCandidate:
    """The step in which the critical pipeline's replicas keep to these queues of lots."""
    turn = [0] * composer.sample_count
    for lot, wanted in zip(lots, plan.wanted_starts, strict=True):
        for p in lot:
            turn[p] = wanted
    stages = composer.graph.pipeline_stages[composer.critical_section.name]
    tables = composer.compose_by_order([[lots[m] for m in q] for q in plan.orders], turn)
    return _build_candidate(composer, tables, {stages[0].name}, (stages, load, plan))


def _build_candidate(
    composer: MicroBatchComposer,
    tables: dict[str, MicroBatchTable],
    in_turn: Container[str] = (),
    planned: tuple[Sequence[Section], pipeline_order.PipelineLoad, pipeline_order.PipelineOrders]
    | None = None,
) -> ScheduleCandidate:
    """The step of these micro-batches, in virtual time; `planned` are the stages and the queues of a pipeline
    that keeps to them."""
    chosen = select_prefetched(composer.plan, composer.graph, tables, composer.samples)
    found = ScheduleCandidate(composer, without_prefetched_time(tables, chosen), chosen, in_turn)
    order = (
        DecoupledSimulation(composer, found.tables, found.messages, found.task_ranges, *planned).simulate()
        if planned is not None
        else None
    )
    found.task_order, found.makespan = simulate_tasks(found.step_tasks.graph) if order is None else order
    return found


def _emit_candidate(c: ScheduleCandidate) -> Schedule:
    return replace(
        emit_programs(c.composer.plan, c.composer.graph, c.tables, c.messages, c.task_ranges, c.task_order),
        prefetchable=c.prefetchable,
    )
