"""The wavefront order: in which order the samples of one global batch pass through the sections' replicas.

The aim is a critical section that never waits: it starts with samples that need no upstream section while the encoders fill, follows
readiness, prefers what owes an upstream backward, and so ends with samples that owe none while the encoders drain. Sections
upstream of it run all forwards first, then backwards, largest first; the others run a backward as soon as they can, which frees
memory soonest.

The order comes from running the step in virtual time (`runtime/timeline.py`): every rank takes the most urgent job that is ready.
The programs of all ranks follow that one global order, which is why they cannot deadlock: each job waits only for jobs that come
before it. Everything is integers and plain Python, so all ranks and the simulator compute the same `Schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from secc.runtime.compose import Composer, Table
from secc.runtime.emit import emit
from secc.runtime.graph import Graph
from secc.runtime.jobs import Messages, Step, make
from secc.runtime.plan import Plan
from secc.runtime.program import SampleMeta, Schedule, pairs
from secc.runtime.timeline import run

ORDERS = ("wavefront", "dataset")


@dataclass
class Candidate:
    """A way to run the step: its micro-batches, jobs, the order in which they start, and how long that takes."""

    tables: dict[str, Table]
    messages: Messages
    step: Step
    order: list[int]
    makespan: int


def schedule(plan: Plan, samples: Sequence[SampleMeta], *, order: str = "wavefront") -> Schedule:
    """Micro-batches and programs of one global batch, `samples` in their order in the batch.

    `order="dataset"` takes the samples as they come, without balancing or reordering (to compare with). Raises ValueError for a plan
    whose sections cannot be ordered or whose costs cannot be evaluated.
    """
    return timed_schedule(plan, samples, order=order)[0]


def timed_schedule(plan: Plan, samples: Sequence[SampleMeta], *, order: str = "wavefront") -> tuple[Schedule, int]:
    """`schedule`, and the nanoseconds it takes by the plan's costs, without transfers and the optimizer."""
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}: one of {', '.join(ORDERS)}")
    graph = Graph(plan)
    composer = Composer(plan, samples, graph)
    if order == "dataset":
        best = _candidate(composer, composer.dataset_order(), in_turn=True)
    else:
        dealt = composer.deal()
        best = _candidate(composer, composer.composed(dealt, composer.turns(dealt)), in_turn=False)
    return emit(plan, graph, best.tables, best.messages, best.step, best.order), best.makespan


def _candidate(composer: Composer, tables: dict[str, Table], in_turn: bool) -> Candidate:
    plan = composer.plan
    micros = Schedule({name: t.micro_batches for name, t in tables.items()}, ())
    messages = {e.name: sorted(pairs(e, micros)) for e in plan.edges}
    step = make(plan, composer.graph, tables, messages, in_turn)
    return Candidate(tables, messages, step, *run(step.jobs))
