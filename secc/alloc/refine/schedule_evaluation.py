"""Evaluates a plan of the solver with the scheduler that ranks run: mean step time over some drawn global
batches.

The solver works with mean samples and closed forms. Here an assignment becomes a plan of sections, stages and
edges (without code), and the runtime's scheduler (`secc.runtime.schedule.scheduler`) orders batches of
samples with the dataset's sizes. So fill and drain of encoders, uneven micro-batches, pipeline bubbles and
uneven replicas count, and so do batches with more images than an encoder's ranks were planned for.

The finished order is then replayed with messages (`replay_order`), because the scheduler ignores them: each
takes the time of a mean sample's message, without contention, which is below 0.4% of the steps of large
models with one or two chunks of layers on a rank. Gradient reductions and the optimizer follow as in the
simulator. Each stage has the layers of its own ranks. Memory counts the micro-batches in flight in that
order, each with its own samples.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise

from secc import process_map
from secc.alloc.problem.candidate_memory import candidate_memory
from secc.alloc.problem.closed_form import evaluate_assignment as value
from secc.alloc.problem.micro_batch_times import (
    micro_batch_time_expressions,
    subgroup_costs,
)
from secc.alloc.problem.parameter_update import update_times
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.types import Assignment, Candidate, Problem
from secc.alloc.problem.workload import Workload
from secc.alloc.refine import prefetch_memory as ahead
from secc.alloc.refine.in_flight_limits import InFlightLimit, in_flight_limit, subgroup_limit
from secc.cluster import GIB
from secc.cost.model import roofline
from secc.cost.model.cost_expressions import scale_expression
from secc.cost.model.patterns_and_transfers import (
    InputPattern,
    input_patterns,
    micro_batch_sizes,
    section_handles_pattern,
)
from secc.ir.analysis import sample_sizes as drawn_samples
from secc.ir.analysis.token_count import token_count
from secc.ir.dialect.ops import GraphOp, strings_of
from secc.runtime.host.gc_control import pause_gc
from secc.runtime.parameters.bucket_limits import BUCKET_BYTES
from secc.runtime.parameters.reduction_times import TimedReduction, run_reductions
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.runtime.plan.schema import (
    Cost,
    Edge,
    Mesh,
    ModelRef,
    Plan,
    Section,
    SubgroupCost,
    Symbol,
    rank_position,
)
from secc.runtime.plan.step_program import SampleMeta, gather_rounds, replica_first_ranks
from secc.runtime.schedule.micro_batches import KnownPackings
from secc.runtime.schedule.order_search import most_searched_tasks
from secc.runtime.schedule.scheduler import ScheduleCandidate as Order
from secc.runtime.schedule.scheduler import find_candidate

UNLIMITED_BYTES = 1 << 62
MIN_PARALLEL_TASKS = 10_000  # schedules with fewer tasks take less time than forking processes
# Tasks that the search for a better order simulates in the time that one takes to be scheduled and evaluated.
SEARCHED_TASKS_PER_TASK = 10
# A first batch with another amount of work or another longest sample than the mean batch, by this share, is a
# poor one to compare plans on.
UNTYPICAL_BATCH = 0.25

GroupRanks = Mapping[str, Sequence[int]]  # ranks by group
BatchSamples = Sequence[SampleMeta]
# a plan, its ranks, and the index of a batch, None for an estimate
EvaluationRequest = tuple[Assignment, GroupRanks, int | None]


@dataclass(frozen=True)
class Evaluation:
    """Mean step time in ns, whether every rank has enough memory, the number of scheduled tasks, for each
    section the ns that its busiest rank computes, and the step time of each batch if there are several.
    `may_improve`: whether an evaluation on the same batch may find a shorter step than this estimate."""

    time_ns: int
    fits: bool
    tasks: int
    busy_ns: Mapping[str, int] = field(default_factory=dict[str, int])
    batch_ns: tuple[int, ...] = ()
    may_improve: bool = False

    def is_better_than(self, other: Evaluation) -> bool:
        """Whether this plan fits, and is faster than the other or that one does not fit."""
        return self.fits and (self.time_ns < other.time_ns or not other.fits)


def _order_typical_first(work: Workload, batches: Sequence[BatchSamples]) -> list[int]:
    """Returns the numbers of the batches with the most typical one first, if the first one is not typical:
    plans are compared on it. A heavy tail makes batches differ by the longest sample in them."""

    def sample_ns(sample: SampleMeta) -> int:
        active = [
            (load, work.mean_micro_batch_sizes(p, 1))
            for load in work.loads.values()
            for p in load.active_patterns
            if p.when == sample.pattern
        ]
        return sum(
            evaluate_expr(f"{load.forward_ns} + {load.backward_ns['none']}", sizes | dict(sample.sizes))
            for load, sizes in active
        )

    measured = [(sum(times), max(times)) for times in ([*map(sample_ns, batch)] for batch in batches)]
    means = [max(1, sum(column)) / len(batches) for column in zip(*measured, strict=True)]
    distances = [
        max(abs(value / mean - 1) for value, mean in zip(values, means, strict=True)) for values in measured
    ]
    typical = 0 if distances[0] <= UNTYPICAL_BATCH else distances.index(min(distances))
    return sorted(range(len(batches)), key=lambda i: (i != typical, i))


# Candidate of each section, group of each section, ranks of each group, index of a batch (None: an estimate).
EvaluatedPlan = tuple[
    tuple[tuple[str, Candidate], ...],
    tuple[tuple[str, str], ...],
    tuple[tuple[str, tuple[int, ...]], ...],
    int | None,
]
KnownEvaluations = dict[EvaluatedPlan, Evaluation]


@dataclass
class SearchBatches:
    """The batches that plans of the same work are compared on, None before they are drawn, and what is packed
    already of each."""

    drawn: list[BatchSamples] | None = None
    packings: dict[int, KnownPackings] = field(default_factory=lambda: defaultdict(KnownPackings))


def mean_evaluation(steps: Sequence[Evaluation]) -> Evaluation:
    """Mean over several batches; fits if all fit."""
    return Evaluation(
        sum(s.time_ns for s in steps) // len(steps),
        all(s.fits for s in steps),
        sum(s.tasks for s in steps),
        {name: sum(s.busy_ns[name] for s in steps) // len(steps) for name in steps[0].busy_ns},
        tuple(s.time_ns for s in steps) if len(steps) > 1 else (),
    )


def expect_searched_tasks(evaluation: Evaluation) -> int:
    """About how many tasks are scheduled in the time that the search for a better order of a step takes."""
    return most_searched_tasks(evaluation.tasks, evaluation.time_ns) // SEARCHED_TASKS_PER_TASK


class PlanEvaluator:
    """Evaluates assignments of one problem on drawn global batches, or on one of mean samples if the graph
    lists none.

    `run_ahead`: bytes that frozen sections may keep for the next step, None for what memory allows
    (`secc.alloc.refine.prefetch_memory`). `known`: evaluations of plans of the same work, which problems
    with other candidates or prices share; `evaluate_once` adds to them. `shared`: the batches, for other
    evaluators as well. `packings`: the micro-batches of sections, by batch; many plans share those of a
    section.
    """

    def __init__(
        self,
        work: Workload,
        problem: Problem,
        run_ahead: int | None = 0,
        known: KnownEvaluations | None = None,
        shared: SearchBatches | None = None,
    ) -> None:
        self.work, self.problem, self.run_ahead = work, problem, run_ahead
        self.known: KnownEvaluations = {} if known is None else known
        shared = SearchBatches() if shared is None else shared
        if shared.drawn is None:
            shared.drawn = [*drawn_samples.draw_search_batches(work.graph, work.global_batch)]
        self._batch_numbers = _order_typical_first(work, shared.drawn) if shared.drawn else [0]
        self.batches = (
            [shared.drawn[i] for i in self._batch_numbers] if shared.drawn else [_mean_samples_batch(work)]
        )
        self.packings = [shared.packings[i] for i in self._batch_numbers]
        self.message_ns = {(e.src, e.dst): self._message_ns(e.src, e.dst) for e in problem.edges}

    def with_problem(self, problem: Problem) -> PlanEvaluator:
        """The evaluator of another problem of the same work, on the same batches."""
        other = copy(self)
        other.problem = problem
        other.message_ns = {(e.src, e.dst): other._message_ns(e.src, e.dst) for e in problem.edges}
        return other

    def steps_as_drawn(self, evaluation: Evaluation) -> tuple[int, ...]:
        """The steps in ns of an evaluation on all batches, in the order in which the batches were drawn; ()
        where there is one batch."""
        steps = dict(zip(self._batch_numbers, evaluation.batch_ns, strict=False))
        return tuple(steps[i] for i in sorted(steps))

    def number_of_mean_batch(self, evaluation: Evaluation) -> int:
        """The number, in the order in which they were drawn, of the batch with the step that is closest to
        the mean of an evaluation on all batches."""
        steps = self.steps_as_drawn(evaluation) or (0,)
        return min(range(len(steps)), key=lambda i: (abs(steps[i] - evaluation.time_ns), i))

    def evaluate(self, assignment: Assignment, ranks: GroupRanks) -> Evaluation:
        """Mean evaluation over all batches."""
        return mean_evaluation(
            evaluate_on_all_cores([(self, (assignment, ranks, i)) for i in range(len(self.batches))])
        )

    def evaluate_in_problems(
        self, problems: Sequence[Problem], assignment: Assignment, ranks: GroupRanks
    ) -> list[Evaluation]:
        """Evaluations on the first batch of a plan in its own problem and in others of the same work."""
        evaluators = self, *map(self.with_problem, problems)
        return evaluate_on_all_cores([(e, (assignment, ranks, 0)) for e in evaluators])

    def estimate_once(self, assignment: Assignment, ranks: GroupRanks) -> Evaluation:
        """The estimate of a plan, which is made unless it is known."""
        (evaluation,) = self.evaluate_once(
            [(assignment, ranks, None)],
            lambda requests: [self.estimate(a, of_group) for a, of_group, _ in requests],
        )
        return evaluation

    def evaluate_once(
        self,
        requests: Sequence[EvaluationRequest],
        evaluate: Callable[[Sequence[EvaluationRequest]], Sequence[Evaluation]],
    ) -> list[Evaluation]:
        """Returns the evaluations of requests; calls `evaluate` with those that are not known yet."""
        return _evaluate_once(
            [(self, request) for request in requests], lambda new: evaluate([request for _, request in new])
        )

    def evaluation_key(self, request: EvaluationRequest) -> EvaluatedPlan:
        """What an evaluation depends on, with the batch."""
        assignment, ranks, batch = request
        return (
            tuple((s, cs[assignment.choice[s]]) for s, cs in self.problem.sections.items()),
            tuple(assignment.group.items()),
            tuple((group, tuple(own)) for group, own in ranks.items()),
            batch,
        )

    def expect_tasks(self, request: EvaluationRequest) -> int:
        """About how many tasks an evaluation on a batch schedules. Those of the search for a better order
        count where another evaluation of the plan tells how long its step is."""
        assignment, ranks, batch = request
        stages = sum(self.problem.sections[s][i].shape.stages for s, i in assignment.choice.items())
        tasks = 2 * stages * len(self.batches[batch or 0])
        known = (self.known.get(self.evaluation_key((assignment, ranks, other))) for other in (None, 0))
        estimate = next((e for e in known if e is not None), None)
        return tasks if estimate is None else estimate.tasks + expect_searched_tasks(estimate)

    def estimate(self, assignment: Assignment, ranks: GroupRanks) -> Evaluation:
        """Evaluation on the first batch with the first order that the scheduler finds; takes a small part
        of the time."""
        return self.evaluate_batch(assignment, ranks, soon=True)

    def evaluate_batch(
        self, assignment: Assignment, ranks: GroupRanks, index: int = 0, *, soon: bool = False
    ) -> Evaluation:
        """Evaluation on the batch of this index. With `soon` the scheduler does not search for better
        orders."""
        batch = self.batches[index]
        chosen = {s: cs[assignment.choice[s]] for s, cs in self.problem.sections.items()}
        plan = self._build_plan(assignment, chosen, ranks)
        message_ns = self.message_ns | {
            (s, s): self._stage_message_ns(s, c) for s, c in chosen.items() if c.pp > 1
        }
        with pause_gc():
            order = find_candidate(plan, batch, soon=soon, packings=self.packings[index])
            timeline = _OrderTimeline(order, message_ns)
            time_ns = self._step_end(plan, chosen, order, timeline, batch)
            fits = self._fits_memory(plan, chosen, timeline)
        return Evaluation(
            self.work.cluster.device.overheads.step_ns(len(batch)) + time_ns,
            fits,
            len(order.task_order),
            _busiest_ranks(order),
            may_improve=order.may_improve,
        )

    # -- the plan

    def _build_plan(self, assignment: Assignment, chosen: Mapping[str, Candidate], ranks: GroupRanks) -> Plan:
        """Plan without code: sections with costs and in-flight limits, and edges."""
        group = assignment.group
        closed_form = value(
            replace(self.problem, capacity=UNLIMITED_BYTES, pools=(), deadline=None), assignment
        )
        limit_of = partial(in_flight_limit, self.work, self.problem, assignment, closed_form)
        prefetch_bytes, _ = ahead.choose_prefetch_memory(
            self.work, self.problem, assignment, closed_form, self.run_ahead
        )
        subgroup_room = partial(subgroup_limit, self.work, self.problem, assignment, closed_form)
        stages = {
            s: self._build_stages(
                s,
                c,
                ranks[group[s]],
                partial(limit_of, s),
                partial(subgroup_room, s, prefetch_bytes),
            )
            for s, c in chosen.items()
        }
        edges = [
            Edge(
                f"{e.src} to {e.dst}",
                stages[e.src][-1].name,
                stages[e.dst][0].name,
                "int8",
                (f"({e.size})",),
                0,
                "0",
                e.grad,
            )
            for e in self.work.crossings
        ]
        for own_stages in stages.values():
            returns_gradient = own_stages[0].mode != "forward"
            edges += [
                Edge(f"{a.name} to {b.name}", a.name, b.name, "int8", ("0",), -1, "", returns_gradient)
                for a, b in pairwise(own_stages)
            ]
        graph = self.work.graph
        return Plan(
            version=0,
            hash="",
            model=ModelRef("", ""),
            world_size=1 + max(r for own_stages in ranks.values() for r in own_stages),
            global_batch=self.work.global_batch,
            widths=graph.widths.data if graph.widths else "global",
            symbols=plan_symbols(graph),
            inputs=(),
            sections=tuple(stage for own_stages in stages.values() for stage in own_stages),
            edges=tuple(edges),
            terms=(),
            ties=(),
            cluster={},
            solver={},
            prediction={},
            run_ahead_gib=prefetch_bytes / GIB,
        )

    def _build_stages(
        self,
        section: str,
        c: Candidate,
        ranks: Sequence[int],
        room_at: Callable[[int], InFlightLimit],
        subgroup_room: Callable[[int], int],
    ) -> list[Section]:
        """Stages of a section, or the section itself without a pipeline."""
        awaited = any(
            e.dst == section and e.grad and self.work.loads[e.src].mode != "forward"
            for e in self.work.crossings
        )
        stages: list[Section] = []
        for i in range(c.shape.stages):
            work, load = self._rank_load(section, c, i)
            place = rank_position(i, c.pp, c.placement)
            stage_ranks = tuple(r for k, r in enumerate(ranks) if k // c.stage_ranks % c.pp == place)
            limit = room_at(i)
            longest = micro_batch_time_expressions(work, load, c.dp, c.sharding, c.recompute)
            own_ns = load.stages.forward_of_stage(longest[0], i), load.stages.backward_of_stage(longest[1], i)
            held = load.cost_under_recompute(c.recompute)
            part = load.stages.held[i] / load.stages.layers if c.chunks > 1 else Fraction(1)
            weight_permille = load.weight_permille.get(c.recompute, 0) if i or awaited else 0
            between = held.kept_between if weight_permille else "0"
            subgroups = subgroup_costs(work, work.loads[section], c, i)
            stage = Section(
                section,
                "",
                load.mode,
                strings_of(load.section.when),
                (),
                (),
                Mesh(stage_ranks, c.dp, 1, c.tp, c.cp, c.ep),
                c.most_samples,
                c.recompute,
                c.sharding,
                cost=Cost(
                    *own_ns,
                    saved=scale_expression(held.saved, part),
                    kept_between="" if between == "0" else scale_expression(between, part),
                ),
                micro_batch_tokens=c.micro_batch_tokens,
                token_count=token_count(self.work.graph) if c.micro_batch_tokens else "",
                in_flight=limit.in_flight,
                room_bytes=limit.size_bytes,
                weight_permille=weight_permille,
                chunks=c.chunks,
                placement=c.placement,
                cp_per=c.cp_per,
                subgroups=tuple(
                    SubgroupCost(
                        s.ranks,
                        replace(
                            s.cost,
                            forward_ns=load.stages.forward_of_stage(s.cost.forward_ns, i),
                            backward_ns=load.stages.backward_of_stage(s.cost.backward_ns, i),
                        ),
                    )
                    for s in subgroups
                ),
                subgroup_bytes=subgroup_room(i) if subgroups else 0,
                whole_batch=bool(self.work.whole_batch_kind(load)),
            )
            stages.append(
                replace(stage, name=f"{section} {i}", pipeline=section, stage=i) if c.pp > 1 else stage
            )
        return stages

    def _rank_load(self, section: str, c: Candidate, stage: int) -> tuple[Workload, SectionLoad]:
        """(workload on the candidate's device kind, load of the section on a rank of this stage)."""
        work = self.work.for_kind(c.kind)
        return work, work.rank_load(work.loads[section], c.shape, stage=stage)

    # -- what the order leaves out

    def _message_ns(self, src: str, dst: str) -> int:
        """Message of a mean sample over an edge."""
        crossing = next(c for c in self.work.crossings if (c.src, c.dst) == (src, dst))
        return self._mean_message_ns(
            crossing.size,
            [
                p
                for p in self.work.loads[src].active_patterns
                if section_handles_pattern(self.work.loads[dst].section, p)
            ],
            1,
        )

    def _stage_message_ns(self, section: str, c: Candidate) -> int:
        """Message of a mean micro-batch from one stage to the next: the input of a layer."""
        load = self.work.loads[section]
        return self._mean_message_ns(
            f"({load.cost.layer_input_bytes})//{max(1, load.cost.layers)}",
            load.active_patterns,
            c.micro_batch,
        )

    def _mean_message_ns(self, size: str, patterns: Sequence[InputPattern], samples: int) -> int:
        """Mean time over patterns of a message of `size` (an expression) for `samples` samples."""
        weighted_sizes = [
            (p.share, evaluate_expr(size, micro_batch_sizes(self.work.graph, p.sizes, samples)))
            for p in patterns
        ]
        total_share = sum((s for s, _ in weighted_sizes), Fraction(0))
        return (
            roofline.section_message_ns(
                int(sum(s * n for s, n in weighted_sizes) / total_share), self.work.cluster
            )
            if total_share
            else 0
        )

    def _step_end(
        self,
        plan: Plan,
        chosen: Mapping[str, Candidate],
        order: Order,
        timeline: _OrderTimeline,
        batch: BatchSamples,
    ) -> int:
        """End of the step, by the rules of the simulator: the sums of gradients begin within a section's last
        backwards and those of a rank run one after the other, gathers follow, and once all ranks have ended
        and prefetched for the next step, each runs its optimizer."""
        program_ends = [0] * plan.world_size
        optimizer_ns = Counter[int]()
        reductions: list[TimedReduction] = []
        prefetch_ends = self._prefetch_ends(plan, order, timeline)
        on_ranks = {(rank, s.user_section_name) for s in plan.sections for rank in s.mesh.ranks}
        sections_on_rank = Counter(rank for rank, _ in on_ranks)
        for s in plan.sections:
            c = chosen[s.user_section_name]
            work, load = self._rank_load(s.user_section_name, c, s.stage)
            ranks = tuple(replica_first_ranks(s))
            ends = timeline.ends[s.name] | prefetch_ends.get(s.name, {})
            for replica in ranks_by_replica(s):
                for rank in replica:
                    program_ends[rank] = max(program_ends[rank], ends.get(replica[0], 0))
            shares_ranks = sections_on_rank[s.mesh.ranks[0]] > 1
            update = update_times(work, load, c.dp, c.sharding, c.pp if shares_ranks else 1)  # of all chunks
            optimizer_ns.update(dict.fromkeys(ranks, update.optimizer // c.chunks))
            if update.sums or update.gathers:
                share = Fraction(BUCKET_BYTES * c.chunks, max(1, load.cost.trainable_bytes))
                reductions.append(
                    TimedReduction(
                        (s.name,),
                        ranks,
                        update.sums // c.chunks,
                        update.gathers // c.chunks,
                        min(Fraction(1), share),
                        update.open_share,
                    )
                )
        last_backwards = {
            s.name: {
                rank: timeline.last_backwards[s.name].get(rank, (program_ends[rank], program_ends[rank]))
                for rank in replica_first_ranks(s)
            }
            for s in plan.sections
        }
        reduced = run_reductions(reductions, last_backwards, program_ends, timeline.first_forwards)
        return max((*program_ends, *(end for _, _, end in reduced))) + max(optimizer_ns.values(), default=0)

    def _prefetch_ends(self, plan: Plan, order: Order, timeline: _OrderTimeline) -> dict[str, dict[int, int]]:
        """When the ranks of prefetching sections have computed their part of the next step, assuming that
        it equals this one; by section and rank. A micro-batch waits for what other sections compute of its
        samples, and holds up those after it."""
        ends_by_section: dict[str, dict[int, int]] = {}
        # when a micro-batch has left the stage before, by pipeline
        stage_passed: dict[str, dict[int, int]] = defaultdict(dict)
        arrivals: dict[str, dict[int, int]] = defaultdict(dict)  # of samples at later sections
        if not order.prefetchable:
            return {}
        place, costs = {job: i for i, job in enumerate(order.task_order)}, order.composer.costs
        for s in map(plan.find_section, order.prefetchable):  # producers come first
            free = {rank: timeline.ends[s.name].get(rank, 0) for rank in replica_first_ranks(s)}
            micros, n = order.tables[s.name].micro_batches, order.step_tasks.ranges[s.name]
            prefetched = sorted(order.prefetchable[s.name], key=lambda m: place[n.forward_start + m])
            forward, _ = costs.micro_batch_times(s, [micros[m].samples for m in prefetched])
            forward_ns = dict(zip(prefetched, forward, strict=True))
            rounds, ranks = gather_rounds([s], {s.name: micros}), replica_first_ranks(s)
            passed, arrived = stage_passed[s.user_section_name], arrivals[s.name]
            consumers = {
                dst: self.message_ns.get((s.user_section_name, plan.find_section(dst).user_section_name), 0)
                for dst in {e.dst for e in plan.edges if e.src == s.name}
            }
            done = set[int]()
            for m in prefetched:
                if m in done:
                    continue
                together = rounds.get((s.name, m), (micros[m],))
                done.update(o.index for o in together)
                samples = [p for o in together for p in o.samples]
                start = max(
                    *(free[ranks[o.replica]] for o in together),
                    *(passed.get(o.index, 0) for o in together),
                    *(arrived.get(p, 0) for p in samples),
                )
                end = start + max(forward_ns[o.index] for o in together)
                for o in together:
                    free[ranks[o.replica]] = passed[o.index] = end
                for dst, message_ns in consumers.items():
                    later = arrivals[dst]
                    for p in samples:
                        later[p] = max(later.get(p, 0), end + message_ns)
            ends_by_section[s.name] = free
        return ends_by_section

    def _fits_memory(self, plan: Plan, chosen: Mapping[str, Candidate], timeline: _OrderTimeline) -> bool:
        """Whether every rank has memory for what stays there and for what is in flight at once."""
        needed: dict[int, int] = defaultdict(int)
        usable: dict[int, int] = {}
        for s in plan.sections:
            c = chosen[s.user_section_name]
            memory = candidate_memory(*self._rank_load(s.user_section_name, c, s.stage), c)
            for ranks in ranks_by_replica(s):
                count, kept_bytes = timeline.in_flight.get((s.name, ranks[0]), (0, 0))
                held_bytes = (
                    memory.total_bytes(1)
                    if s.mode == "forward"
                    else kept_bytes * c.chunks + memory.total_bytes(count) - memory.activation_bytes(count)
                ) // c.chunks  # `memory` is that of all chunks on the rank
                for rank in ranks:
                    needed[rank] += held_bytes
                    usable[rank] = self.problem.usable_bytes(c)
        return all(held_bytes <= usable[rank] for rank, held_bytes in needed.items())


class _OrderTimeline:
    """Replayed order: the end of each section, ns of its first forward, start and end of its last backward,
    and the most that it holds at once (micro-batches, bytes), by rank."""

    def __init__(self, order: Order, message_ns: Mapping[tuple[str, str], int]) -> None:
        ranges, rank = order.step_tasks.ranges, order.step_tasks.graph.rank_of
        starts, ends = replay_order(order, message_ns)
        self.ends: dict[str, dict[int, int]] = {name: {} for name in ranges}
        for name, n in ranges.items():
            ends_of_section = self.ends[name]
            for part in n.ranges:
                for on, end in zip(rank[part.start : part.stop], ends[part.start : part.stop], strict=True):
                    if end > ends_of_section.get(on, 0):
                        ends_of_section[on] = end
        self.first_forwards: dict[str, dict[int, int]] = {name: {} for name in ranges}
        for name, n in ranges.items():
            first_starts, backward_ns = dict[int, int](), order.tables[name].backward_ns
            for m in range(n.count):
                task = n.forward_start + m
                on, start = rank[task], starts[task]
                if start < first_starts.get(on, start + 1):
                    first_starts[on] = start
                    both = backward_ns[m] if n.backward_start == n.forward_start else 0
                    self.first_forwards[name][on] = ends[task] - both - start
        self.last_backwards: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in ranges}
        for name, n in ranges.items():
            last_of_section, table = self.last_backwards[name], order.tables[name]
            for begin in {n.backward_start, n.weight_start} - {-1}:
                # a task that is both begins with the forward
                both = table.backward_ns if begin == n.forward_start else ()
                for m in range(n.count):
                    on, end = rank[begin + m], ends[begin + m]
                    if end > last_of_section.get(on, (0, 0))[1]:
                        last_of_section[on] = end - both[m] if both else starts[begin + m], end
        # by (section, rank): (most micro-batches in flight, most bytes that they keep)
        self.in_flight: dict[tuple[str, int], tuple[int, int]] = {}
        changes: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
        for name, n in ranges.items():
            table = order.tables[name]
            between = table.between_bytes or [0] * n.count
            for m, kept in enumerate(table.saved_bytes if n.release_start >= 0 else ()):
                changes[name, rank[n.forward_start + m]] += [
                    (starts[n.forward_start + m], 1, kept),
                    (ends[n.release_start + m], -1, -kept - between[m]),
                ]
                if between[m]:
                    changes[name, rank[n.forward_start + m]].append(
                        (starts[n.backward_start + m], 0, between[m])
                    )
        for section_and_rank, some in changes.items():
            some.sort()
            self.in_flight[section_and_rank] = (
                max(accumulate(c[1] for c in some)),
                max(accumulate(c[2] for c in some)),
            )


def evaluate_on_all_cores(requests: Sequence[tuple[PlanEvaluator, EvaluationRequest]]) -> list[Evaluation]:
    """Evaluations on batches, by evaluators of the same work. Those that are not known yet run on all cores,
    if they take long enough."""

    def evaluate_new(new: Sequence[tuple[PlanEvaluator, EvaluationRequest]]) -> list[Evaluation]:
        tasks = sum(evaluator.expect_tasks(request) for evaluator, request in new)
        map_requests = process_map.map_in_processes if tasks >= MIN_PARALLEL_TASKS else map
        return [*map_requests(lambda item: item[0].evaluate_batch(*item[1][:2], item[1][2] or 0), new)]

    return _evaluate_once(requests, evaluate_new)


def _evaluate_once(
    requests: Sequence[tuple[PlanEvaluator, EvaluationRequest]],
    evaluate: Callable[[Sequence[tuple[PlanEvaluator, EvaluationRequest]]], Sequence[Evaluation]],
) -> list[Evaluation]:
    """Returns the evaluations of requests to evaluators of the same work; calls `evaluate` with those that
    are not known yet. An estimate of a step without time for a search is the evaluation on the first batch as
    well."""
    keys = [evaluator.evaluation_key(request) for evaluator, request in requests]
    known = requests[0][0].known if requests else {}
    new = {k: request for k, request in zip(keys, requests, strict=True) if k not in known}
    found = dict(zip(new, evaluate([*new.values()]) if new else (), strict=True))
    known |= found
    for (choices, groups, of_group, batch), evaluation in found.items():
        if batch is None and not evaluation.may_improve:
            known.setdefault((choices, groups, of_group, 0), evaluation)
    return [known[k] for k in keys]


def replay_order(order: Order, message_ns: Mapping[tuple[str, str], int]) -> tuple[list[int], list[int]]:
    """Replays a finished order with messages; returns start and end of each task in ns.

    `message_ns`: delay of a message between two sections, in either direction, if they are on different
    ranks. Ranks keep the order of their tasks; links are never busy.
    """
    graph = order.step_tasks.graph
    section_ranges = [
        (n.section.user_section_name, part) for n in order.step_tasks.ranges.values() for part in n.ranges
    ]
    names = list(dict.fromkeys(name for name, _ in section_ranges))
    section = [0] * len(graph.rank_of)
    for name, part in section_ranges:
        section[part.start : part.stop] = [names.index(name)] * len(part)
    message_table = [[message_ns.get((a, b), 0) or message_ns.get((b, a), 0) for b in names] for a in names]
    rank = graph.rank_of
    duration = graph.duration_ns
    successors = graph.successors
    extra_ranks = {job: extra for job in order.task_order if (extra := graph.extra_ranks_of(job))}
    ready, free, ends, starts = [0] * len(rank), [0] * graph.rank_count, [0] * len(rank), [0] * len(rank)
    simultaneous = {**{job: (job,) for job in extra_ranks}, **graph.simultaneous}
    # (start, duration) of simultaneous tasks, once the first of them is reached in the order
    started_together: dict[int, tuple[int, int]] = {}

    def earliest_start(job: int) -> int:
        return max(ready[job], free[rank[job]], *(free[r] for r in extra_ranks.get(job, ())))

    for job in order.task_order:
        on, duration_ns = rank[job], duration[job]
        start = free[on] if free[on] > ready[job] else ready[job]
        if job in simultaneous:
            group = simultaneous[job]
            if job not in started_together:
                started_together |= dict.fromkeys(
                    group, (max(map(earliest_start, group)), max(map(duration.__getitem__, group)))
                )
            start, duration_ns = started_together[job]
            for r in extra_ranks.get(job, ()):
                free[r] = start + duration_ns
        starts[job], delays = start, message_table[section[job]]
        free[on] = ends[job] = end = start + duration_ns
        for then in successors[job]:
            arrival = end if rank[then] == on else end + delays[section[then]]
            if arrival > ready[then]:
                ready[then] = arrival
    return starts, ends


def _busiest_ranks(order: Order) -> dict[str, int]:
    """Ns that the busiest rank of each section computes for it."""
    busy: dict[str, Counter[int]] = defaultdict(Counter[int])
    graph = order.step_tasks.graph
    for n in order.step_tasks.ranges.values():
        by_rank = busy[n.section.user_section_name]
        for part in n.ranges:
            for rank, ns in zip(
                graph.rank_of[part.start : part.stop], graph.duration_ns[part.start : part.stop], strict=True
            ):
                by_rank[rank] += ns
    return {name: max(by_rank.values(), default=0) for name, by_rank in busy.items()}


def plan_symbols(graph: GraphOp) -> tuple[Symbol, ...]:
    """The size symbols of a plan of this graph."""
    return tuple(
        Symbol(n, s.kind.data, s.key.data, s.dim.data)
        for n, s in graph.symbols.items()
        if s.kind.data in drawn_samples.SIZE_KINDS
    )


def _mean_samples_batch(work: Workload) -> tuple[SampleMeta, ...]:
    """Global batch of mean samples, with patterns by their shares."""
    found: list[SampleMeta] = []
    due = Fraction(0)
    for p in input_patterns(work.graph):
        due += p.share * work.global_batch
        sizes = micro_batch_sizes(work.graph, p.sizes, 1)
        while len(found) < round(due):
            found.append(SampleMeta(len(found), p.when, sizes))
    return tuple(found)
