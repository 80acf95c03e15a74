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

from secc.runtime.host.gc_control import collector_paused
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.section_graph import Graph
from secc.runtime.plan.step_program import Micros, SampleMeta, Schedule, pairs
from secc.runtime.schedule import pipeline_order
from secc.runtime.schedule.batch_packing import Cut, Lot
from secc.runtime.schedule.cross_step_prefetch import early, ready
from secc.runtime.schedule.decoupled_sim import Apart
from secc.runtime.schedule.emit_programs import emit
from secc.runtime.schedule.list_scheduler import run
from secc.runtime.schedule.micro_batches import Composer, Table
from secc.runtime.schedule.order_search import Least, affordable, improve, tries
from secc.runtime.schedule.task_graph import Messages, Step, make, numbered
from secc.runtime.schedule.upstream_estimate import critical_load

ORDERS = ("wavefront", "dataset")
STYLE_TRIES = 8  # what a style takes, in tries of the search
# what other queues of a pipeline take, of which every move looks at all that upstream does: more with many
# replicas
QUEUE_TRIES = 6
NOTHING_SHORTER = 1 << 62  # ns, as the time that no order can beat


@dataclass
class Candidate:
    """A way to run the step: its micro-batches, those that the step before may compute, and the sections
    whose replicas run their forwards in the micro-batches' order; the messages between micro-batches, and
    where their jobs stand; the order in which the jobs start, and how long that takes."""

    composer: Composer
    tables: dict[str, Table]
    early: Micros
    in_turn: Container[str] = ()
    order: list[int] = field(default_factory=list[int])
    makespan: int = 0

    def __post_init__(self) -> None:
        micros = Schedule({name: t.micro_batches for name, t in self.tables.items()}, ())
        whole = {s.name: s.whole for s in self.composer.plan.sections}  # stages have the same micro-batches
        self.messages: Messages = {
            e.name: [(m.index, m.index) for m in self.tables[e.src].micro_batches if m.samples]
            if whole[e.src] == whole[e.dst]
            else sorted(pairs(e, micros))
            for e in self.composer.plan.edges
        }
        self.numbers = numbered(self.composer.plan, self.composer.graph, self.tables)
        self.count = sum(len(part) for n in self.numbers.values() for part in n.parts)

    @cached_property
    def step(self) -> Step:
        """The jobs, which take a while to make and not every order needs."""
        return make(self.composer.plan, self.composer.graph, self.tables, self.messages, self.in_turn)


def schedule(plan: Plan, samples: Sequence[SampleMeta], *, order: str = "wavefront") -> Schedule:
    """Micro-batches and programs of one global batch, `samples` in their order in the batch.

    `order="dataset"` takes the samples as they come, without balancing or reordering (to compare with).
    Raises ValueError for a plan whose sections cannot be ordered or whose costs cannot be evaluated.
    """
    return timed_schedule(plan, samples, order=order)[0]


class Orders:
    """`schedule` for one plan. The last ones are kept, because a step may be ordered before its samples are
    loaded and again after, and for the step before it, which may run ahead; and because steps may be alike:
    where all samples are, every step has one schedule."""

    def __init__(self, plan: Plan, order: str) -> None:
        self._plan, self._order = plan, order
        self._known: deque[tuple[list[object], Schedule]] = deque(maxlen=4 if plan.run_ahead_gib > 0 else 2)

    def __call__(self, samples: Sequence[SampleMeta]) -> Schedule:
        """The schedule of a global batch; the same object for one whose samples have the same patterns and
        sizes."""
        wanted: list[object] = [(s.pattern, s.sizes) for s in samples]
        for known, found in self._known:
            if known == wanted:
                return found
        self._known.append((wanted, schedule(self._plan, samples, order=self._order)))
        return self._known[-1][1]


def timed_schedule(
    plan: Plan, samples: Sequence[SampleMeta], *, order: str = "wavefront"
) -> tuple[Schedule, int]:
    """`schedule`, and the nanoseconds it takes by the plan's costs, without transfers and the optimizer."""
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}: one of {', '.join(ORDERS)}")
    with collector_paused():
        return _timed_schedule(plan, samples, order)


def ordered(plan: Plan, samples: Sequence[SampleMeta], *, soon: bool = False) -> Candidate:
    """The order that `schedule` makes programs of; with `soon` the first of those that it tries, which takes
    a part of the time."""
    with collector_paused():
        composer = Composer(plan, samples, Graph(plan))
        return _ordered(composer, (lambda: NOTHING_SHORTER) if soon else cache(composer.least))


class Arranged:
    """The step of micro-batches that are given, each section's replicas taking theirs in the order in which
    they stand in `cuts`.

    `cuts` is by whole sections; stages of a pipeline share theirs. Sections in `ahead` do all forwards first,
    the others a backward as soon as they can; nothing is computed ahead of the step. Raises ValueError where
    the micro-batches wait for each other in a circle.
    """

    def __init__(
        self, plan: Plan, samples: Sequence[SampleMeta], cuts: Mapping[str, Cut], ahead: Iterable[str] = ()
    ) -> None:
        plan = replace(plan, run_ahead_gib=0.0)
        with collector_paused():
            composer = Composer(plan, samples, Graph(plan, frozenset(ahead)))
            tables: dict[str, Table] = {}
            for s in plan.sections:
                turn = [0] * len(samples)
                for place, (_, positions) in enumerate(cuts[s.whole]):
                    for p in positions:
                        turn[p] = place
                tables[s.name] = composer.table(s, cuts[s.whole], turn)
            self._candidate = _candidate(composer, tables, tables)

    @property
    def makespan(self) -> int:
        """Ns by the plan's costs, without transfers and the optimizer."""
        return self._candidate.makespan

    def schedule(self) -> Schedule:
        """Its programs."""
        with collector_paused():
            return _emitted(self._candidate)


def _timed_schedule(plan: Plan, samples: Sequence[SampleMeta], order: str) -> tuple[Schedule, int]:
    composer = Composer(plan, samples, Graph(plan))
    if order == "dataset":
        tables = composer.dataset_order()
        found = _candidate(composer, tables, tables)
        return _emitted(found), found.makespan
    best = _ordered(composer, cache(composer.least))
    return _emitted(best), best.makespan


def _ordered(composer: Composer, least: Least) -> Candidate:
    """The shortest order found; `least` tells a time in ns that none can beat, which bounds what looking for
    others is worth."""
    best = _best(composer, least)
    if count := tries(best.count, best.makespan, least) // (
        2 if best.in_turn else 1
    ):  # queues took the other half
        found = best.order, best.makespan
        best.tables, (best.order, best.makespan) = improve(
            best.step, composer.graph, best.tables, best.early, found, count
        )
    return best


def _best(composer: Composer, least: Least) -> Candidate:
    """The shortest of the candidates; the later ones are tried only where there is something to gain."""
    if (found := critical_load(composer)) is not None:
        return _best_queues(composer, *found, least)
    first, *others = composer.styles()
    best = _candidate(composer, composer.wavefront(first))
    for style in others:
        if tries(best.count, best.makespan, least) < STYLE_TRIES:
            break
        found = _candidate(composer, composer.wavefront(style))
        best = found if found.makespan < best.makespan else best
    return best


def _best_queues(
    composer: Composer, load: pipeline_order.Load, lots: Sequence[Lot], least: Least
) -> Candidate:
    """A critical pipeline's queues: planned in the likeliest manner first, in others and with moves as long
    as the step is worth it."""
    plan, spent = pipeline_order.plan(load, pipeline_order.LIKELIEST), 0
    best = queue_candidate(composer, load, lots, plan)
    for manner in pipeline_order.OTHERS:
        spent += QUEUE_TRIES * (1 + load.replicas // pipeline_order.MANY)
        if not affordable(best.count, best.makespan, least, spent):
            break
        other = pipeline_order.move(load, pipeline_order.plan(load, manner))
        found = queue_candidate(composer, load, lots, other)
        best, plan = (found, other) if found.makespan < best.makespan else (best, plan)
    if count := tries(best.count, best.makespan, least):
        found = queue_candidate(composer, load, lots, pipeline_order.search(load, plan, count // 2))
        best = found if found.makespan < best.makespan else best
    return best


def queue_candidate(
    composer: Composer, load: pipeline_order.Load, lots: Sequence[Lot], plan: pipeline_order.Queues
) -> Candidate:
    """The step in which the critical pipeline's replicas keep to these queues of lots."""
    turn = [0] * composer.count
    for lot, wanted in zip(lots, plan.wanted, strict=True):
        for p in lot:
            turn[p] = wanted
    stages = composer.graph.stages[composer.critical.name]
    tables = composer.queued([[lots[m] for m in q] for q in plan.queues], turn)
    return _candidate(composer, tables, {stages[0].name}, (stages, load, plan))


def _candidate(
    composer: Composer,
    tables: dict[str, Table],
    in_turn: Container[str] = (),
    planned: tuple[Sequence[Section], pipeline_order.Load, pipeline_order.Queues] | None = None,
) -> Candidate:
    """The step of these micro-batches, in virtual time; `planned` are the stages and the queues of a pipeline
    that keeps to them."""
    chosen = early(composer.plan, composer.graph, tables, composer.samples)
    found = Candidate(composer, ready(tables, chosen), chosen, in_turn)
    order = (
        Apart(composer, found.tables, found.messages, found.numbers, *planned).order()
        if planned is not None
        else None
    )
    found.order, found.makespan = run(found.step.jobs) if order is None else order
    return found


def _emitted(c: Candidate) -> Schedule:
    return replace(
        emit(c.composer.plan, c.composer.graph, c.tables, c.messages, c.numbers, c.order), early=c.early
    )
