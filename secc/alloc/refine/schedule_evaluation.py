"""What a choice of the solver takes under the order that ranks run: the orders of some drawn global batches,
and their mean step.

The solver's times are of mean samples and closed forms. Here the choice becomes a plan of sections, stages
and edges, without code, whose wavefront order (`secc.runtime.schedule.scheduler`) is computed for samples
with the sizes that the dataset's have: what encoders' fill and drain, ragged micro-batches, pipelines'
bubbles and uneven replicas cost is in it, and, as batches differ, what it costs where one has more images
than the ranks of an encoder were meant for. Messages take their time at the samples' mean size, without
contention; reductions and the optimizer follow a section's last backward. A rank's memory counts the
micro-batches that are in flight in that order, each with its own samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise

from secc import process_map
from secc.alloc.problem.candidates import (
    SectionLoad,
    Workload,
    candidate_memory,
    gradient_and_optimizer_ns,
    micro_batch_time_expressions,
)
from secc.alloc.problem.closed_form import evaluate_assignment as value
from secc.alloc.problem.types import Assignment, Candidate, Problem
from secc.alloc.refine import prefetch_memory as ahead
from secc.alloc.refine.in_flight_limits import InFlightLimit, in_flight_limit
from secc.cluster import GIB
from secc.cost.model import roofline
from secc.cost.model.patterns_and_transfers import (
    InputPattern,
    input_patterns,
    micro_batch_sizes,
    section_handles_pattern,
)
from secc.ir.analysis import sample_sizes as drawn_samples
from secc.ir.dialect.ops import strings_of
from secc.runtime.host.gc_control import pause_gc
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.replica_routes import ranks_by_replica
from secc.runtime.plan.schema import Cost, Edge, Mesh, ModelRef, Plan, Section, Symbol
from secc.runtime.plan.step_program import SampleMeta, replica_first_ranks
from secc.runtime.schedule.scheduler import ScheduleCandidate as Order
from secc.runtime.schedule.scheduler import find_candidate

UNLIMITED_BYTES = 1 << 62  # bytes
MIN_PARALLEL_TASKS = 10_000  # in orders together, for which copies of the process would take longer
MAX_DRAWN_BATCHES, MAX_DRAWN_SAMPLES = 4, 2048  # that a choice is tried on at most; large batches differ less

GroupRanks = Mapping[str, Sequence[int]]  # of each group
BatchSamples = Sequence[SampleMeta]


@dataclass(frozen=True)
class Evaluation:
    """A choice under the real order: ns of a mean step, whether all that ranks hold fits, and how many
    forwards and backwards ran."""

    time_ns: int
    fits: bool
    tasks: int


def mean_evaluation(steps: Sequence[Evaluation]) -> Evaluation:
    """The mean step of several batches."""
    return Evaluation(
        sum(s.time_ns for s in steps) // len(steps), all(s.fits for s in steps), sum(s.tasks for s in steps)
    )


class PlanEvaluator:
    """Tries choices of one problem on drawn global batches; on one of mean samples where the graph lists
    none.

    `run_ahead` are bytes that frozen sections may keep for the next global batch, None for what memory allows
    (`secc.alloc.refine.prefetch_memory`).
    """

    def __init__(self, work: Workload, problem: Problem, run_ahead: int | None = 0) -> None:
        self.work, self.problem, self.run_ahead = work, problem, run_ahead
        count = max(1, min(MAX_DRAWN_BATCHES, MAX_DRAWN_SAMPLES // work.global_batch))
        self.batches = drawn_samples.draw_batches(work.graph, work.global_batch, count) or [
            _mean_samples_batch(work)
        ]
        self.message_ns = {(e.src, e.dst): self._message_ns(e.src, e.dst) for e in problem.edges}

    def evaluate(self, assignment: Assignment, ranks: GroupRanks) -> Evaluation:
        """The steps of the choice on these ranks."""
        stages = sum(self.problem.sections[s][i].pp for s, i in assignment.choice.items())
        jobs = 2 * stages * sum(map(len, self.batches))
        mapped = process_map.map_in_processes if jobs >= MIN_PARALLEL_TASKS else map
        return mean_evaluation(
            [*mapped(lambda batch: self.evaluate_batch(assignment, ranks, batch), self.batches)]
        )

    def estimate(self, assignment: Assignment, ranks: GroupRanks) -> Evaluation:
        """The step of the first batch in the first order that is found, which takes a small part of the
        time."""
        return self.evaluate_batch(assignment, ranks, self.batches[0], soon=True)

    def evaluate_batch(
        self, assignment: Assignment, ranks: GroupRanks, batch: BatchSamples, *, soon: bool = False
    ) -> Evaluation:
        """The step of one batch."""
        chosen = {s: cs[assignment.choice[s]] for s, cs in self.problem.sections.items()}
        plan = self._build_plan(assignment, chosen, ranks)
        waits = self.message_ns | {
            (s, s): self._stage_message_ns(s, c) for s, c in chosen.items() if c.pp > 1
        }
        with pause_gc():
            order = find_candidate(plan, batch, soon=soon)
            timeline = _OrderTimeline(order, waits)
            time_ns, fits = (
                self._step_end(plan, chosen, order, timeline, batch),
                self._fits_memory(plan, chosen, timeline),
            )
        return Evaluation(
            self.work.cluster.device.overheads.step_ns(len(batch)) + time_ns, fits, len(order.task_order)
        )

    # -- the plan
    # -----------------------------------------------------------------------------------------------------------------

    def _build_plan(self, assignment: Assignment, chosen: Mapping[str, Candidate], ranks: GroupRanks) -> Plan:
        group = assignment.group
        priced = value(replace(self.problem, capacity=UNLIMITED_BYTES, pools=(), deadline=None), assignment)
        held = partial(in_flight_limit, self.work, self.problem, assignment, priced)
        stages = {s: self._build_stages(s, c, ranks[group[s]], partial(held, s)) for s, c in chosen.items()}
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
        for own in stages.values():
            passes = own[0].mode != "forward"
            edges += [
                Edge(f"{a.name} to {b.name}", a.name, b.name, "int8", ("0",), -1, "", passes)
                for a, b in pairwise(own)
            ]
        room_ahead, _ = ahead.choose_prefetch_memory(
            self.work, self.problem, assignment, priced, self.run_ahead
        )
        graph = self.work.graph
        symbols = tuple(
            Symbol(n, s.kind.data, s.key.data, s.dim.data)
            for n, s in graph.symbols.items()
            if s.kind.data in drawn_samples.SIZE_KINDS
        )
        return Plan(
            version=0,
            hash="",
            model=ModelRef("", ""),
            world_size=1 + max(r for own in ranks.values() for r in own),
            global_batch=self.work.global_batch,
            widths=graph.widths.data if graph.widths else "global",
            symbols=symbols,
            inputs=(),
            sections=tuple(stage for own in stages.values() for stage in own),
            edges=tuple(edges),
            terms=(),
            ties=(),
            cluster={},
            solver={},
            prediction={},
            run_ahead_gib=room_ahead / GIB,
        )

    def _build_stages(
        self, section: str, c: Candidate, ranks: Sequence[int], room_at: Callable[[int], InFlightLimit]
    ) -> list[Section]:
        work, load = self._rank_load(section, c)
        saved = load.cost_under_recompute(c.recompute).saved
        cost, when = (
            Cost(*micro_batch_time_expressions(work, load, c.dp, c.sharding, c.recompute), saved=saved),
            strings_of(load.section.when),
        )
        found: list[Section] = []
        for i in range(c.pp):
            own = tuple(r for k, r in enumerate(ranks) if k // c.tp % c.pp == i)
            held = room_at(i)
            made = Section(
                section,
                "",
                load.mode,
                when,
                (),
                (),
                Mesh(own, c.dp, 1, c.tp),
                c.micro_batch,
                c.recompute,
                c.sharding,
                cost=cost,
                in_flight=held.in_flight,
                room_bytes=held.size_bytes,
            )
            found.append(
                replace(made, name=f"{section} {i}", pipeline=section, stage=i) if c.pp > 1 else made
            )
        return found

    def _rank_load(self, section: str, c: Candidate) -> tuple[Workload, SectionLoad]:
        """The workload on the candidate's kind of device, and the section on one of its ranks."""
        work = self.work.for_kind(c.kind)
        return work, work.rank_load(work.loads[section], c.tp, c.pp)

    # -- what the order leaves out
    # --------------------------------------------------------------------------------------------------

    def _message_ns(self, src: str, dst: str) -> int:
        """The message of a mean sample that both ends see."""
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
        """The message of a mean micro-batch from one stage to the next: what enters a layer."""
        load = self.work.loads[section]
        return self._mean_message_ns(
            f"({load.cost.layer_input_bytes})//{max(1, load.cost.layers)}",
            load.active_patterns,
            c.micro_batch,
        )

    def _mean_message_ns(self, size: str, patterns: Sequence[InputPattern], samples: int) -> int:
        sizes = [
            (p.share, evaluate_expr(size, micro_batch_sizes(self.work.graph, p.sizes, samples)))
            for p in patterns
        ]
        share = sum((s for s, _ in sizes), Fraction(0))
        return (
            roofline.section_message_ns(int(sum(s * n for s, n in sizes) / share), self.work.cluster)
            if share
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
        """The end of the step: a rank reduces its sections' gradients one after the other, computes ahead for
        the next step, and steps."""
        last: dict[int, list[tuple[int, int]]] = defaultdict(list)
        ahead = self._prefetch_ends(plan, order, timeline, batch)
        for s in plan.sections:
            c = chosen[s.user_section_name]
            update = gradient_and_optimizer_ns(*self._rank_load(s.user_section_name, c), c.dp, c.sharding)
            if s.name not in ahead:
                last[s.mesh.ranks[0]].append((max(timeline.ends[s.name].values(), default=0), update))
                continue
            for rank, end in ahead[s.name].items():
                last[rank].append((end, update))
        return max(_run_sequentially(ends) for ends in last.values())

    def _prefetch_ends(
        self, plan: Plan, order: Order, timeline: _OrderTimeline, batch: BatchSamples
    ) -> dict[str, dict[int, int]]:
        """When the ranks of sections that run ahead have computed their part of the next step, which is
        alike: a micro-batch passes from stage to stage."""
        found: dict[str, dict[int, int]] = {}
        passed: dict[tuple[str, int], int] = {}  # when a micro-batch has left the stage before
        for s in (s for s in plan.sections if s.name in order.prefetchable):
            free = {rank: timeline.ends[s.name].get(rank, 0) for rank in replica_first_ranks(s)}
            micros, n = order.tables[s.name].micro_batches, order.step_tasks.ranges[s.name]
            early = [
                m for job in order.task_order if (m := job - n.forward_start) in order.prefetchable[s.name]
            ]
            forward, _ = PredictedCosts(plan, batch).micro_batch_times(s, [micros[m].samples for m in early])
            for m, ns in zip(early, forward, strict=True):
                rank = replica_first_ranks(s)[micros[m].replica]
                free[rank] = passed[s.user_section_name, m] = (
                    max(free[rank], passed.get((s.user_section_name, m), 0)) + ns
                )
            found[s.name] = free
        return found

    def _fits_memory(self, plan: Plan, chosen: Mapping[str, Candidate], timeline: _OrderTimeline) -> bool:
        """Whether every rank has memory for its sections: all that stays, and what is in flight at once."""
        found: dict[int, int] = defaultdict(int)
        usable: dict[int, int] = {}
        for s in plan.sections:
            c = chosen[s.user_section_name]
            memory = candidate_memory(*self._rank_load(s.user_section_name, c), c)
            for ranks in ranks_by_replica(s):
                number, kept = timeline.in_flight.get((s.name, ranks[0]), (0, 0))
                held = (
                    memory.total_bytes(1)
                    if s.mode == "forward"
                    else kept + memory.total_bytes(number) - memory.activation_bytes(number)
                )
                for rank in ranks:
                    found[rank] += held
                    usable[rank] = self.problem.usable_bytes(c)
        return all(held <= usable[rank] for rank, held in found.items())


class _OrderTimeline:
    """When the jobs of an order run, with messages between ranks: each section's end and the most that it
    holds at once, by rank."""

    def __init__(self, order: Order, waits: Mapping[tuple[str, str], int]) -> None:
        numbers, rank = order.step_tasks.ranges, order.step_tasks.graph.rank_of
        starts, ends = _simulate_order(order, waits)
        self.ends: dict[str, dict[int, int]] = {name: {} for name in numbers}
        for name, n in numbers.items():
            found = self.ends[name]
            for part in n.ranges:
                for on, end in zip(rank[part.start : part.stop], ends[part.start : part.stop], strict=True):
                    if end > found.get(on, 0):
                        found[on] = end
        self.in_flight: dict[
            tuple[str, int], tuple[int, int]
        ] = {}  # micro-batches in flight, and the bytes that they keep
        changes: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
        for name, n in numbers.items():
            for m, kept in enumerate(order.tables[name].saved_bytes if n.release_start >= 0 else ()):
                changes[name, rank[n.forward_start + m]] += [
                    (starts[n.forward_start + m], 1, kept),
                    (ends[n.release_start + m], -1, -kept),
                ]
        for place, some in changes.items():
            some.sort()
            self.in_flight[place] = max(accumulate(c[1] for c in some)), max(accumulate(c[2] for c in some))


def _simulate_order(order: Order, waits: Mapping[tuple[str, str], int]) -> tuple[list[int], list[int]]:
    """When the jobs of an order start and end."""
    jobs, parts = (
        order.step_tasks.graph,
        [(n.section.user_section_name, part) for n in order.step_tasks.ranges.values() for part in n.ranges],
    )
    names = list(dict.fromkeys(name for name, _ in parts))
    section = [0] * len(jobs.rank_of)
    for name, part in parts:
        section[part.start : part.stop] = [names.index(name)] * len(part)
    message = [[waits.get((a, b), 0) or waits.get((b, a), 0) for b in names] for a in names]
    rank, duration, successors, beside = (
        jobs.rank_of,
        jobs.duration_ns,
        jobs.successors,
        jobs.extra_ranks_by_task(),
    )
    ready, free, ends, starts = [0] * len(rank), [0] * jobs.rank_count, [0] * len(rank), [0] * len(rank)
    together = {**{job: (job,) for job in beside}, **jobs.simultaneous}
    joined: dict[
        int, tuple[int, int]
    ] = {}  # when those that run at the same time start, and how long they take

    def possible(job: int) -> int:
        return max(ready[job], free[rank[job]], *(free[r] for r in beside.get(job, ())))

    for job in order.task_order:
        on, lasts = rank[job], duration[job]
        start = free[on] if free[on] > ready[job] else ready[job]
        if job in together:
            some = together[job]
            if job not in joined:
                joined |= dict.fromkeys(
                    some, (max(map(possible, some)), max(map(duration.__getitem__, some)))
                )
            start, lasts = joined[job]
            for r in beside.get(job, ()):
                free[r] = start + lasts
        starts[job], away = start, message[section[job]]
        free[on] = ends[job] = end = start + lasts
        for then in successors[job]:
            at = end if rank[then] == on else end + away[section[then]]
            if at > ready[then]:
                ready[then] = at
    return starts, ends


def _run_sequentially(ends: Sequence[tuple[int, int]]) -> int:
    """When work of so many ns each, possible from `ends` on, is done."""
    now = 0
    for end, update in sorted(ends):
        now = max(now, end) + update
    return now


def _mean_samples_batch(work: Workload) -> tuple[SampleMeta, ...]:
    """A global batch of mean samples, patterns by their shares."""
    found: list[SampleMeta] = []
    due = Fraction(0)
    for p in input_patterns(work.graph):
        due += p.share * work.global_batch
        sizes = micro_batch_sizes(work.graph, p.sizes, 1)
        while len(found) < round(due):
            found.append(SampleMeta(len(found), p.when, sizes))
    return tuple(found)
