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
from secc.alloc.problem.candidates import Load, Workload, room_of, times_of, update_ns
from secc.alloc.problem.closed_form import evaluate as value
from secc.alloc.problem.types import Assignment, Candidate, Problem
from secc.alloc.refine import prefetch_memory as ahead
from secc.alloc.refine.in_flight_limits import Room, room
from secc.cluster import GIB
from secc.cost.model import roofline
from secc.cost.model.patterns_and_transfers import Pattern, is_active, micro_batch, patterns
from secc.ir.analysis import sample_sizes as drawn_samples
from secc.ir.dialect.ops import strings
from secc.runtime.host.gc_control import collector_paused
from secc.runtime.plan.expr_eval import evaluate
from secc.runtime.plan.predicted_costs import Costs
from secc.runtime.plan.replica_routes import replicas
from secc.runtime.plan.schema import Cost, Edge, Mesh, ModelRef, Plan, Section, Symbol
from secc.runtime.plan.step_program import SampleMeta, replica_ranks
from secc.runtime.schedule.scheduler import Candidate as Order
from secc.runtime.schedule.scheduler import ordered

UNLIMITED = 1 << 62  # bytes
FEW_JOBS = 10_000  # in orders together, for which copies of the process would take longer
BATCHES, SAMPLES = 4, 2048  # that a choice is tried on at most; large batches differ less

Ranks = Mapping[str, Sequence[int]]  # of each group
Samples = Sequence[SampleMeta]


@dataclass(frozen=True)
class Tried:
    """A choice under the real order: ns of a mean step, whether all that ranks hold fits, and how many
    forwards and backwards ran."""

    time_ns: int
    fits: bool
    jobs: int


def mean(steps: Sequence[Tried]) -> Tried:
    """The mean step of several batches."""
    return Tried(
        sum(s.time_ns for s in steps) // len(steps), all(s.fits for s in steps), sum(s.jobs for s in steps)
    )


class Trial:
    """Tries choices of one problem on drawn global batches; on one of mean samples where the graph lists
    none.

    `run_ahead` are bytes that frozen sections may keep for the next global batch, None for what memory allows
    (`secc.alloc.refine.prefetch_memory`).
    """

    def __init__(self, work: Workload, problem: Problem, run_ahead: int | None = 0) -> None:
        self.work, self.problem, self.run_ahead = work, problem, run_ahead
        count = max(1, min(BATCHES, SAMPLES // work.global_batch))
        self.batches = drawn_samples.drawn(work.graph, work.global_batch, count) or [_means(work)]
        self.waits = {(e.src, e.dst): self._message_ns(e.src, e.dst) for e in problem.edges}

    def run(self, assignment: Assignment, ranks: Ranks) -> Tried:
        """The steps of the choice on these ranks."""
        stages = sum(self.problem.sections[s][i].pp for s, i in assignment.choice.items())
        jobs = 2 * stages * sum(map(len, self.batches))
        mapped = process_map.mapped if jobs >= FEW_JOBS else map
        return mean([*mapped(lambda batch: self.step(assignment, ranks, batch), self.batches)])

    def look(self, assignment: Assignment, ranks: Ranks) -> Tried:
        """The step of the first batch in the first order that is found, which takes a small part of the
        time."""
        return self.step(assignment, ranks, self.batches[0], soon=True)

    def step(self, assignment: Assignment, ranks: Ranks, batch: Samples, *, soon: bool = False) -> Tried:
        """The step of one batch."""
        chosen = {s: cs[assignment.choice[s]] for s, cs in self.problem.sections.items()}
        plan = self._plan(assignment, chosen, ranks)
        waits = self.waits | {(s, s): self._between_stages(s, c) for s, c in chosen.items() if c.pp > 1}
        with collector_paused():
            order = ordered(plan, batch, soon=soon)
            timeline = _Timeline(order, waits)
            time_ns, fits = (
                self._closed(plan, chosen, order, timeline, batch),
                self._fits(plan, chosen, timeline),
            )
        return Tried(self.work.cluster.device.overheads.step_ns(len(batch)) + time_ns, fits, len(order.order))

    # -- the plan
    # -----------------------------------------------------------------------------------------------------------------

    def _plan(self, assignment: Assignment, chosen: Mapping[str, Candidate], ranks: Ranks) -> Plan:
        group = assignment.group
        priced = value(replace(self.problem, capacity=UNLIMITED, pools=(), deadline=None), assignment)
        held = partial(room, self.work, self.problem, assignment, priced)
        stages = {s: self._stages(s, c, ranks[group[s]], partial(held, s)) for s, c in chosen.items()}
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
        room_ahead, _ = ahead.room(self.work, self.problem, assignment, priced, self.run_ahead)
        graph = self.work.graph
        symbols = tuple(
            Symbol(n, s.kind.data, s.key.data, s.dim.data)
            for n, s in graph.symbols.items()
            if s.kind.data in drawn_samples.KINDS
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

    def _stages(
        self, section: str, c: Candidate, ranks: Sequence[int], room_at: Callable[[int], Room]
    ) -> list[Section]:
        work, load = self._load(section, c)
        saved = load.under(c.recompute).saved
        cost, when = (
            Cost(*times_of(work, load, c.dp, c.sharding, c.recompute), saved=saved),
            strings(load.section.when),
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
                room_bytes=held.size,
            )
            found.append(
                replace(made, name=f"{section} {i}", pipeline=section, stage=i) if c.pp > 1 else made
            )
        return found

    def _load(self, section: str, c: Candidate) -> tuple[Workload, Load]:
        """The workload on the candidate's kind of device, and the section on one of its ranks."""
        work = self.work.on(c.kind)
        return work, work.on_rank(work.loads[section], c.tp, c.pp)

    # -- what the order leaves out
    # --------------------------------------------------------------------------------------------------

    def _message_ns(self, src: str, dst: str) -> int:
        """The message of a mean sample that both ends see."""
        crossing = next(c for c in self.work.crossings if (c.src, c.dst) == (src, dst))
        return self._mean_ns(
            crossing.size,
            [p for p in self.work.loads[src].active if is_active(self.work.loads[dst].section, p)],
            1,
        )

    def _between_stages(self, section: str, c: Candidate) -> int:
        """The message of a mean micro-batch from one stage to the next: what enters a layer."""
        load = self.work.loads[section]
        return self._mean_ns(f"({load.cost.summed})//{max(1, load.cost.layers)}", load.active, c.micro_batch)

    def _mean_ns(self, size: str, patterns: Sequence[Pattern], samples: int) -> int:
        sizes = [(p.share, evaluate(size, micro_batch(self.work.graph, p.sizes, samples))) for p in patterns]
        share = sum((s for s, _ in sizes), Fraction(0))
        return (
            roofline.message_ns(int(sum(s * n for s, n in sizes) / share), self.work.cluster) if share else 0
        )

    def _closed(
        self, plan: Plan, chosen: Mapping[str, Candidate], order: Order, timeline: _Timeline, batch: Samples
    ) -> int:
        """The end of the step: a rank reduces its sections' gradients one after the other, computes ahead for
        the next step, and steps."""
        last: dict[int, list[tuple[int, int]]] = defaultdict(list)
        ahead = self._ahead(plan, order, timeline, batch)
        for s in plan.sections:
            c = chosen[s.whole]
            update = update_ns(*self._load(s.whole, c), c.dp, c.sharding)
            if s.name not in ahead:
                last[s.mesh.ranks[0]].append((max(timeline.ends[s.name].values(), default=0), update))
                continue
            for rank, end in ahead[s.name].items():
                last[rank].append((end, update))
        return max(_one_after_another(ends) for ends in last.values())

    def _ahead(
        self, plan: Plan, order: Order, timeline: _Timeline, batch: Samples
    ) -> dict[str, dict[int, int]]:
        """When the ranks of sections that run ahead have computed their part of the next step, which is
        alike: a micro-batch passes from stage to stage."""
        found: dict[str, dict[int, int]] = {}
        passed: dict[tuple[str, int], int] = {}  # when a micro-batch has left the stage before
        for s in (s for s in plan.sections if s.name in order.early):
            free = {rank: timeline.ends[s.name].get(rank, 0) for rank in replica_ranks(s)}
            micros, n = order.tables[s.name].micro_batches, order.step.numbers[s.name]
            early = [m for job in order.order if (m := job - n.forward) in order.early[s.name]]
            forward, _ = Costs(plan, batch).of(s, [micros[m].samples for m in early])
            for m, ns in zip(early, forward, strict=True):
                rank = replica_ranks(s)[micros[m].replica]
                free[rank] = passed[s.whole, m] = max(free[rank], passed.get((s.whole, m), 0)) + ns
            found[s.name] = free
        return found

    def _fits(self, plan: Plan, chosen: Mapping[str, Candidate], timeline: _Timeline) -> bool:
        """Whether every rank has memory for its sections: all that stays, and what is in flight at once."""
        found: dict[int, int] = defaultdict(int)
        usable: dict[int, int] = {}
        for s in plan.sections:
            c = chosen[s.whole]
            memory = room_of(*self._load(s.whole, c), c)
            for ranks in replicas(s):
                number, kept = timeline.held.get((s.name, ranks[0]), (0, 0))
                held = (
                    memory.total(1)
                    if s.mode == "forward"
                    else kept + memory.total(number) - memory.kept(number)
                )
                for rank in ranks:
                    found[rank] += held
                    usable[rank] = self.problem.usable(c)
        return all(held <= usable[rank] for rank, held in found.items())


class _Timeline:
    """When the jobs of an order run, with messages between ranks: each section's end and the most that it
    holds at once, by rank."""

    def __init__(self, order: Order, waits: Mapping[tuple[str, str], int]) -> None:
        numbers, rank = order.step.numbers, order.step.jobs.rank
        starts, ends = _begun(order, waits)
        self.ends: dict[str, dict[int, int]] = {name: {} for name in numbers}
        for name, n in numbers.items():
            found = self.ends[name]
            for part in n.parts:
                for on, end in zip(rank[part.start : part.stop], ends[part.start : part.stop], strict=True):
                    if end > found.get(on, 0):
                        found[on] = end
        self.held: dict[
            tuple[str, int], tuple[int, int]
        ] = {}  # micro-batches in flight, and the bytes that they keep
        changes: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
        for name, n in numbers.items():
            for m, kept in enumerate(order.tables[name].kept if n.last >= 0 else ()):
                changes[name, rank[n.forward + m]] += [
                    (starts[n.forward + m], 1, kept),
                    (ends[n.last + m], -1, -kept),
                ]
        for place, some in changes.items():
            some.sort()
            self.held[place] = max(accumulate(c[1] for c in some)), max(accumulate(c[2] for c in some))


def _begun(order: Order, waits: Mapping[tuple[str, str], int]) -> tuple[list[int], list[int]]:
    """When the jobs of an order start and end."""
    jobs, parts = (
        order.step.jobs,
        [(n.section.whole, part) for n in order.step.numbers.values() for part in n.parts],
    )
    names = list(dict.fromkeys(name for name, _ in parts))
    section = [0] * len(jobs.rank)
    for name, part in parts:
        section[part.start : part.stop] = [names.index(name)] * len(part)
    message = [[waits.get((a, b), 0) or waits.get((b, a), 0) for b in names] for a in names]
    rank, duration, successors, beside = jobs.rank, jobs.duration, jobs.successors, jobs.beside()
    ready, free, ends, starts = [0] * len(rank), [0] * jobs.ranks, [0] * len(rank), [0] * len(rank)
    together = {**{job: (job,) for job in beside}, **jobs.joined}
    joined: dict[
        int, tuple[int, int]
    ] = {}  # when those that run at the same time start, and how long they take

    def possible(job: int) -> int:
        return max(ready[job], free[rank[job]], *(free[r] for r in beside.get(job, ())))

    for job in order.order:
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


def _one_after_another(ends: Sequence[tuple[int, int]]) -> int:
    """When work of so many ns each, possible from `ends` on, is done."""
    now = 0
    for end, update in sorted(ends):
        now = max(now, end) + update
    return now


def _means(work: Workload) -> tuple[SampleMeta, ...]:
    """A global batch of mean samples, patterns by their shares."""
    found: list[SampleMeta] = []
    due = Fraction(0)
    for p in patterns(work.graph):
        due += p.share * work.global_batch
        sizes = micro_batch(work.graph, p.sizes, 1)
        while len(found) < round(due):
            found.append(SampleMeta(len(found), p.when, sizes))
    return tuple(found)
