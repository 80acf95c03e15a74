"""The scheduler: in which order the samples of one global batch pass through the sections' replicas.

The aim is a critical section that never waits. It starts with samples that need no upstream section while the
encoders fill, then follows readiness, prefers samples that owe a gradient upstream, and so ends with samples
that owe none while the encoders drain.

1. *Assignment* (`micro_batches`, `batch_packing`). Samples that need upstream sections are assigned first,
   largest first, each to the least loaded replica (longest processing time first), then the others. Every
   replica gets its share of both, and all end together. Micro-batches of several samples hold samples of
   similar size.
2. *Urgency* (`task_graph`). Each replica of the critical section orders its samples by the gradient work that
   they owe upstream, most first. The work before a sample in that order is its critical start time, and
   upstream sections take samples by that time: all forwards first, then backwards, the largest first. Other
   sections run a backward as soon as they can, which frees memory soonest. If the critical section is a
   pipeline, the orders of its replicas are planned instead (`pipeline_order`, `upstream_estimate`), with long
   micro-batches on few replicas.
3. *Simulation* (`list_scheduler`). List scheduling (Graham 1966): a free rank starts the most urgent ready
   task. Pipeline replicas with a planned order are simulated one by one (`pipeline_replica_sim`) and the
   other sections separately (`decoupled_sim`). If the makespan is not close to the lower bound, other
   priority rules are tried, and then small changes (`order_search`), as long as the step is worth the time.
   Where that order holds more than a rank has memory for, large samples are computed alone (`memory_bound`).
4. *Programs* (`emit_programs`) follow that one global order of tasks. They cannot deadlock, because each task
   waits only for tasks before it.
5. *Cross-step prefetch* (`cross_step_prefetch`). If the plan has memory for it, frozen upstream sections
   compute their first micro-batches in the previous step; in the simulation these take no time.

Invariants: a micro-batch holds samples of one input pattern; a sample stays on its rank through all sections
on the same ranks; equal inputs give equal programs on any machine, because all arithmetic is on integers.

Limits: without prefetch, a step with a frozen upstream section as loaded as the critical one ends later by up
to the largest sample (whether another order within one step could do better is open). Encoders with few
images each cannot be balanced. A task is never delayed for a more urgent one that is about to be ready.
Transfers take no time in the simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from secc.runtime.host.gc_control import pause_gc
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.section_graph import SectionGraph
from secc.runtime.plan.step_program import (
    MemoryExcess,
    MicroBatchSets,
    SampleMeta,
    Schedule,
    micro_batch_pairs,
)
from secc.runtime.schedule import pipeline_order
from secc.runtime.schedule.batch_packing import AssignedMicroBatches, SamplePositions
from secc.runtime.schedule.cross_step_prefetch import (
    find_prefetchable_sections,
    select_prefetched,
    without_prefetched_time,
)
from secc.runtime.schedule.decoupled_sim import DecoupledSimulation
from secc.runtime.schedule.emit_programs import emit_programs
from secc.runtime.schedule.list_scheduler import simulate_tasks
from secc.runtime.schedule.memory_bound import (
    RankHolders,
    add_turns,
    choose_samples_alone,
    find_memory_excesses,
    holders_of_rank,
    separate_samples,
)
from secc.runtime.schedule.micro_batches import KnownPackings, MicroBatchComposer, MicroBatchTable
from secc.runtime.schedule.order_search import MakespanBound, affordable_runs, improve_order, worthwhile_tries
from secc.runtime.schedule.pipeline_order import PipelineOrders
from secc.runtime.schedule.task_graph import MessagePairs, StepTasks, build_step_tasks, number_tasks
from secc.runtime.schedule.upstream_estimate import critical_pipeline_load

SCHEDULE_ORDERS = ("wavefront", "dataset")
PRIORITY_RULE_TRIES = (
    8  # time of composing and simulating another priority rule, in tries of the order search
)
# Time of planning a pipeline by another strategy, in the same unit, for each MAX_SIMULATED_REPLICAS replicas;
# each of its moves estimates all of upstream.
PIPELINE_ORDER_TRIES = 6
PIPELINE_MOVES_TRIES = 3  # time of moving micro-batches between planned orders, in the same unit
# Samples stay inside wider replicas on the same ranks only if the makespan is shorter by more than 1/32: the
# wide sections end last then, so that nothing hides the sums of their gradients, which no makespan counts.
INSIDE_MARGIN_DIVISOR = 32
ALONE_TRIES = 5  # orders with more and more samples alone: none in the first one, all in the last one
# Ranks that hold the same sections are of one kind. If more kinds than this have no memory for other samples
# while they compute a large one, all ranks compute large samples in turns.
MAX_RANKS_IN_TURNS = 8
UNREACHABLE_NS = 1 << 62  # as a lower bound: every makespan is good enough


@dataclass
class ScheduleCandidate:
    """One way to run the step, and its simulated makespan.

    `tables` has each section's micro-batches; `prefetchable` the micro-batches that the previous step may
    compute. Replicas of `in_order_sections` run their forwards in the order of their micro-batches;
    `limited_sections` keep to their bytes although they may hold any number of micro-batches.
    `messages` are the pairs of micro-batches that exchange a tensor, and `task_ranges` the task numbers of
    each section. `task_order` lists all tasks by start time; `makespan` is in ns. `may_improve`: whether the
    step is long enough for a search that was left out.
    """

    composer: MicroBatchComposer
    tables: dict[str, MicroBatchTable]
    prefetchable: MicroBatchSets
    in_order_sections: Container[str] = ()
    limited_sections: Container[str] = ()
    task_order: list[int] = field(default_factory=list[int])
    makespan: int = 0
    may_improve: bool = False

    def __post_init__(self) -> None:
        micros = Schedule({name: t.micro_batches for name, t in self.tables.items()}, ())
        user_section = {s.name: s.user_section_name for s in self.composer.plan.sections}
        # Stages of a pipeline have the same micro-batches, so micro-batch i sends to micro-batch i.
        self.messages: MessagePairs = {
            e.name: [(m.index, m.index) for m in self.tables[e.src].micro_batches if m.samples]
            if user_section[e.src] == user_section[e.dst]
            else sorted(micro_batch_pairs(e, micros))
            for e in self.composer.plan.edges
        }
        self.task_ranges = number_tasks(self.composer.plan, self.composer.graph, self.tables)
        self.task_count = sum(len(part) for n in self.task_ranges.values() for part in n.ranges)

    @cached_property
    def step_tasks(self) -> StepTasks:
        """The task graph; built on demand, because it takes a while and decoupled simulation does not need
        it.
        """
        return build_step_tasks(
            self.composer.plan,
            self.composer.graph,
            self.tables,
            self.messages,
            self.in_order_sections,
            limited=self.limited_sections,
        )


PlannedCandidate = tuple[ScheduleCandidate, PipelineOrders]  # and the orders that it keeps to


def schedule_batch(plan: Plan, samples: Sequence[SampleMeta], *, order: str = "wavefront") -> Schedule:
    """Returns micro-batches and programs of one global batch; `samples` are in their order in the batch.

    `order="dataset"` takes the samples as they come, without balancing or reordering, as a baseline. Raises
    ValueError for a plan with cyclic edges or with costs that cannot be evaluated.
    """
    return schedule_with_makespan(plan, samples, order=order)[0]


class ScheduleCache:
    """Calls `schedule_batch` for one plan and keeps the latest results.

    A step may be scheduled before its samples are loaded and again after that, and, with prefetch, for the
    step before it. Steps of equal samples all share one schedule.
    """

    def __init__(self, plan: Plan, order: str) -> None:
        self._plan, self._order = plan, order
        self._recent: deque[tuple[list[object], Schedule]] = deque(maxlen=4 if plan.run_ahead_gib > 0 else 2)

    def __call__(self, samples: Sequence[SampleMeta]) -> Schedule:
        """Returns the schedule of a global batch; the same object for batches with the same patterns and
        sizes.
        """
        signature: list[object] = [(s.pattern, s.sizes) for s in samples]
        for recent_signature, schedule in self._recent:
            if recent_signature == signature:
                return schedule
        self._recent.append((signature, schedule_batch(self._plan, samples, order=self._order)))
        return self._recent[-1][1]


def schedule_with_makespan(
    plan: Plan, samples: Sequence[SampleMeta], *, order: str = "wavefront"
) -> tuple[Schedule, int]:
    """Returns `schedule_batch` and its predicted makespan in ns, without transfers and the optimizer."""
    if order not in SCHEDULE_ORDERS:
        raise ValueError(f"unknown order {order!r}; expected one of {', '.join(SCHEDULE_ORDERS)}")
    with pause_gc():
        return _schedule_with_makespan(plan, samples, order)


def find_candidate(
    plan: Plan,
    samples: Sequence[SampleMeta],
    *,
    soon: bool = False,
    packings: KnownPackings | None = None,
) -> ScheduleCandidate:
    """Returns the candidate that `schedule_batch` writes programs for.

    With `soon`, it is the first candidate, without search, which takes a fraction of the time; where it has
    no time for a search, the candidate is the same. `packings`: what was packed for other plans and the same
    samples; what is packed now is added.
    """
    asked = list[int]()

    def no_gain() -> int:
        asked.append(UNREACHABLE_NS)
        return UNREACHABLE_NS

    with pause_gc():
        composer = MicroBatchComposer(plan, samples, SectionGraph(plan), packings)
        best = _find_candidate(composer, no_gain if soon else cache(composer.makespan_lower_bound))
        best.may_improve = bool(asked)  # without affordable tries, no bound was asked for
        return best


class FixedSchedule:
    """The step of given micro-batches, in a given order on each replica; for baselines.

    `micro_batches` has each user section's as (replica, sample positions); stages of a pipeline share theirs.
    Sections named in `forwards_first` run all forwards first, the others run a backward as soon as they can;
    nothing is prefetched. Raises ValueError if the micro-batches wait for each other in a circle.
    """

    def __init__(
        self,
        plan: Plan,
        samples: Sequence[SampleMeta],
        micro_batches: Mapping[str, AssignedMicroBatches],
        forwards_first: Iterable[str] = (),
    ) -> None:
        plan = replace(plan, run_ahead_gib=0.0)
        with pause_gc():
            composer = MicroBatchComposer(plan, samples, SectionGraph(plan, frozenset(forwards_first)))
            tables: dict[str, MicroBatchTable] = {}
            for section in plan.sections:
                start_times = [0] * len(samples)
                for position, (_, positions) in enumerate(micro_batches[section.user_section_name]):
                    for sample in positions:
                        start_times[sample] = position
                tables[section.name] = composer.build_table(
                    section, micro_batches[section.user_section_name], start_times
                )
            self._candidate = _build_candidate(composer, tables, tables)

    @property
    def makespan(self) -> int:
        """Predicted makespan in ns, without transfers and the optimizer."""
        return self._candidate.makespan

    def emit_schedule(self) -> Schedule:
        """Returns the schedule with its programs."""
        with pause_gc():
            return _emit_candidate(self._candidate)


def _schedule_with_makespan(plan: Plan, samples: Sequence[SampleMeta], order: str) -> tuple[Schedule, int]:
    composer = MicroBatchComposer(plan, samples, SectionGraph(plan))
    if order == "dataset":
        tables = composer.compose_in_dataset_order()
        best = _build_candidate(composer, tables, tables)
    else:
        best = _find_candidate(composer, cache(composer.makespan_lower_bound))
    best, over_memory = _bound_memory(best)
    return replace(_emit_candidate(best), over_memory=over_memory), best.makespan


def _bound_memory(candidate: ScheduleCandidate) -> tuple[ScheduleCandidate, tuple[MemoryExcess, ...]]:
    """Returns a candidate that keeps all ranks within memory, with no excess, or the last one that was tried
    with what it exceeds."""
    plan, alone = candidate.composer.plan, set[int]()
    for count in range(ALONE_TRIES + 1):
        excesses = _find_excesses(candidate)
        if not excesses or count == ALONE_TRIES or any(s.whole_batch for s in plan.sections):
            break
        if count:
            more = choose_samples_alone(plan, candidate.tables, excesses, alone)
            if more == alone:
                break
            alone = more if count < ALONE_TRIES - 1 else set(range(candidate.composer.sample_count))
            if fitting := _fit_with_alone(candidate, alone, excesses):
                return fitting, ()
        candidate = _build_with_alone(candidate, alone)
    return candidate, excesses


def _find_excesses(candidate: ScheduleCandidate) -> tuple[MemoryExcess, ...]:
    return find_memory_excesses(
        candidate.composer.plan, candidate.tables, candidate.task_ranges, candidate.task_order
    )


def _fit_with_alone(
    candidate: ScheduleCandidate, alone: set[int], excesses: Iterable[MemoryExcess]
) -> ScheduleCandidate | None:
    """Returns the shortest step with the samples `alone` before or behind all other samples that keeps all
    ranks within memory, None if there is none. First only ranks that lacked room take turns, then also those
    that lack it in that order, at last all ranks."""
    plan, best = candidate.composer.plan, None
    for before in (True, False):
        ranks: set[RankHolders] | None = {holders_of_rank(plan, e.rank) for e in excesses}
        while True:
            tried = _build_with_alone(candidate, alone, before, ranks)
            if best is not None and tried.makespan >= best.makespan:
                break
            over = _find_excesses(tried)
            if not over:
                best = tried
                break
            if ranks is None:
                break
            more = {holders_of_rank(plan, e.rank) for e in over}
            ranks = None if more <= ranks or len(ranks) >= MAX_RANKS_IN_TURNS else ranks | more
    return best


def _build_with_alone(
    candidate: ScheduleCandidate,
    alone: set[int],
    before: bool = False,
    only: Collection[RankHolders] | None = None,
) -> ScheduleCandidate:
    """Returns the step of a candidate's micro-batches with the samples `alone` computed one after the other,
    before or behind all other samples (`memory_bound`), and every section limited to its bytes. Ranks with
    sections and replicas that are not in `only` compute them in any order."""
    composer, plan = candidate.composer, candidate.composer.plan
    tables: dict[str, MicroBatchTable] = {}
    turns: dict[str, list[int]] = {}
    for s in plan.sections:
        table, start_times = candidate.tables[s.name], [0] * composer.sample_count
        for m, start in zip(table.micro_batches, table.critical_start_ns, strict=True):
            for p in m.samples:
                start_times[p] = 0 if before and p in alone else start
        cut, own_turns = separate_samples(s, table.micro_batches, alone)
        turns[s.name] = [t - composer.sample_count - 1 if t and before else t for t in own_turns]
        tables[s.name] = composer.build_table(s, cut, start_times)
    prefetchable = select_prefetched(plan, composer.graph, tables, composer.samples)
    limited = frozenset(s.name for s in plan.sections if s.room_bytes)
    rebuilt = ScheduleCandidate(
        composer, without_prefetched_time(tables, prefetchable), prefetchable, limited_sections=limited
    )
    add_turns(plan, rebuilt.step_tasks, tables, turns, only)
    rebuilt.task_order, _, rebuilt.makespan, _ = simulate_tasks(rebuilt.step_tasks.graph)
    return rebuilt


def _find_candidate(composer: MicroBatchComposer, lower_bound: MakespanBound) -> ScheduleCandidate:
    """Returns the shortest candidate found. `lower_bound` returns a makespan in ns that no order can beat;
    the gap to it bounds the time spent on the search.
    """
    best = _try_candidates(composer, lower_bound)
    count = worthwhile_tries(best.task_count, best.makespan, lower_bound)
    if best.in_order_sections:  # planning the pipeline's orders took the other half
        count //= 2
    if count:
        best.tables, (best.task_order, best.makespan) = improve_order(
            best.step_tasks,
            composer.graph,
            best.tables,
            best.prefetchable,
            (best.task_order, best.makespan),
            count,
        )
    return best


def _try_candidates(composer: MicroBatchComposer, lower_bound: MakespanBound) -> ScheduleCandidate:
    """Returns the shortest candidate; tries further priority rules only while there is something to gain."""
    if (pipeline := critical_pipeline_load(composer)) is not None:
        return _try_pipeline_orders(composer, *pipeline, lower_bound)
    first, *other_rules = composer.list_priority_rules()
    best = _build_candidate(composer, composer.compose_by_priority(first))
    for rule in other_rules:
        if worthwhile_tries(best.task_count, best.makespan, lower_bound) < PRIORITY_RULE_TRIES:
            break
        candidate = _build_candidate(composer, composer.compose_by_priority(rule))
        best = candidate if candidate.makespan < best.makespan else best
    is_affordable = affordable_runs(best.task_count, best.makespan, lambda: 0, PRIORITY_RULE_TRIES)
    if is_affordable and composer.assign_inside():
        candidate = _build_candidate(composer, composer.compose_by_priority(first))
        most = best.makespan - candidate.makespan // INSIDE_MARGIN_DIVISOR
        best = candidate if candidate.makespan < most else best
    return best


def _try_pipeline_orders(
    composer: MicroBatchComposer,
    load: pipeline_order.PipelineLoad,
    micro_batches: Sequence[SamplePositions],
    lower_bound: MakespanBound,
) -> ScheduleCandidate:
    """Returns the shortest candidate with planned orders of the critical pipeline's replicas.

    The likeliest strategy comes first, and those for upstream where that decides the end; others, and then
    changes of single orders, are tried as long as the step is worth the time.
    """

    def build_candidate(planned: PipelineOrders) -> PlannedCandidate:
        return pipeline_order_candidate(composer, load, micro_batches, planned), planned

    def makespan_of(built: PlannedCandidate) -> int:
        return built[0].makespan

    likeliest = pipeline_order.plan_orders(load, pipeline_order.LIKELIEST_STRATEGY)
    first, *others = sorted(
        [likeliest, *pipeline_order.plans_for_upstream(load, likeliest)], key=lambda planned: planned.end
    )
    best, spent = build_candidate(first), PIPELINE_MOVES_TRIES
    for planned in others:
        if planned.end < makespan_of(best):  # estimated ends are seldom too late
            best = min(best, build_candidate(planned), key=makespan_of)
    if affordable_runs(best[0].task_count, best[0].makespan, lower_bound, spent):
        best = min(best, build_candidate(pipeline_order.improve_last_order(load, best[1])), key=makespan_of)
    for strategy in pipeline_order.OTHER_STRATEGIES:
        spent += PIPELINE_ORDER_TRIES * (1 + load.replica_count // pipeline_order.MAX_SIMULATED_REPLICAS)
        if not affordable_runs(best[0].task_count, best[0].makespan, lower_bound, spent):
            break
        planned = pipeline_order.plan_orders(load, strategy)
        best = min(best, build_candidate(pipeline_order.improve_last_order(load, planned)), key=makespan_of)
    if count := worthwhile_tries(best[0].task_count, best[0].makespan, lower_bound):
        best = min(
            best, build_candidate(pipeline_order.search_orders(load, best[1], count // 2)), key=makespan_of
        )
    return best[0]


def pipeline_order_candidate(
    composer: MicroBatchComposer,
    load: pipeline_order.PipelineLoad,
    micro_batches: Sequence[SamplePositions],
    orders: PipelineOrders,
) -> ScheduleCandidate:
    """Returns the candidate in which the critical pipeline's replicas keep to the given orders of
    micro-batches.
    """
    start_times = [0] * composer.sample_count
    for micro_batch, start in zip(micro_batches, orders.wanted_starts, strict=True):
        for p in micro_batch:
            start_times[p] = start
    stages = composer.graph.pipeline_stages[composer.critical_section.name]
    tables = composer.compose_by_order(
        [[micro_batches[m] for m in order] for order in orders.orders], start_times
    )
    return _build_candidate(composer, tables, {stages[0].name}, (stages, load, orders))


def _build_candidate(
    composer: MicroBatchComposer,
    tables: dict[str, MicroBatchTable],
    in_order_sections: Container[str] = (),
    planned: tuple[Sequence[Section], pipeline_order.PipelineLoad, PipelineOrders] | None = None,
) -> ScheduleCandidate:
    """Simulates the step of these micro-batches. `planned` has the stages, load and orders of a pipeline with
    planned orders.
    """
    prefetchable = select_prefetched(composer.plan, composer.graph, tables, composer.samples)
    candidate = ScheduleCandidate(
        composer, without_prefetched_time(tables, prefetchable), prefetchable, in_order_sections
    )
    # None if the parts of the step depend on each other in ways that the decoupled simulation does not cover;
    # then all tasks are simulated together.
    decoupled = None
    if planned is not None:
        decoupled = DecoupledSimulation(
            composer, candidate.tables, candidate.messages, candidate.task_ranges, *planned
        ).simulate()
    if decoupled is None:
        candidate.task_order, _, candidate.makespan, _ = simulate_tasks(candidate.step_tasks.graph)
    else:
        candidate.task_order, candidate.makespan = decoupled
    return candidate


def _emit_candidate(candidate: ScheduleCandidate) -> Schedule:
    composer, prefetchable = candidate.composer, candidate.prefetchable
    frozen = find_prefetchable_sections(composer.plan, composer.graph) if prefetchable else ()
    micros = [(s, [m.samples for m in candidate.tables[s.name].micro_batches]) for s in frozen]
    return replace(
        emit_programs(
            composer.plan,
            composer.graph,
            candidate.tables,
            candidate.messages,
            candidate.task_ranges,
            candidate.task_order,
        ),
        prefetchable=prefetchable,
        forward_ns={s.name: composer.costs.micro_batch_times(s, samples)[0] for s, samples in micros},
    )
