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

from secc.runtime.compose import Composition, Graph, Urgency, compose
from secc.runtime.emit import emit
from secc.runtime.plan import Plan, Section
from secc.runtime.program import SampleMeta, Schedule, owes_backward, pairs, replica_ranks, returns_gradient
from secc.runtime.timeline import Job, run

ORDERS = ("wavefront", "dataset")
JobKey = tuple[str, str, int]  # kind, section, micro-batch


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
    composition = compose(plan, samples, graph, order)
    messages = {e.name: sorted(pairs(e, Schedule(composition.micro_batches, ()))) for e in plan.edges}
    jobs = _jobs(plan, graph, composition, in_turn=order == "dataset")
    _depend(plan, messages, jobs)
    timeline = run(list(jobs.values()), plan.world_size)
    return emit(plan, graph, composition.micro_batches, messages, timeline), timeline.makespan


def _jobs(plan: Plan, graph: Graph, composition: Composition, in_turn: bool) -> dict[JobKey, Job]:
    """One job for each forward and backward, with its rank, duration and priority; a backward waits for its forward.

    `in_turn` makes each replica run its forwards in the order of the samples.
    """
    jobs: dict[JobKey, Job] = {}
    for section in graph.order:
        ranks, depth = replica_ranks(section), graph.depth[section.name]
        ahead = _runs_ahead(plan, graph, composition, section)
        last: dict[int, Job] = {}
        for micro, u in zip(composition.micro_batches[section.name], composition.urgency[section.name], strict=True):
            first, then = _priorities(u, ahead, in_turn, depth)
            key = ("F", section.name, micro.index)
            jobs[key] = forward = Job(len(jobs), *key, ranks[micro.replica], u.forward_ns, first)
            if in_turn and micro.replica in last:
                last[micro.replica].before(forward)
            last[micro.replica] = forward
            if owes_backward(section):
                key = ("B", section.name, micro.index)
                jobs[key] = Job(len(jobs), *key, ranks[micro.replica], u.backward_ns, then)
                forward.before(jobs[key])
    return jobs


def _runs_ahead(plan: Plan, graph: Graph, composition: Composition, section: Section) -> bool:
    """Whether a section does all its forwards first: it feeds the critical section from other ranks."""
    critical = plan.section(composition.critical)
    return section.name in graph.ancestors[critical.name] and section.mesh.ranks != critical.mesh.ranks


def _priorities(u: Urgency, ahead: bool, in_turn: bool, depth: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a forward and its backward. On a rank, backwards come before forwards and downstream sections before upstream ones,
    except where a section runs ahead.
    """
    size = u.forward_ns + u.backward_ns
    if ahead:
        return (0, 0, u.turn, -size), (1, 0, -u.upstream_ns - u.backward_ns)
    forward = (1, -depth, u.turn) if in_turn else (1, -depth, u.wave, -u.upstream_ns, -size)
    return forward, (0, -depth, -u.upstream_ns, -size)


def _depend(plan: Plan, messages: dict[str, list[tuple[int, int]]], jobs: dict[JobKey, Job]) -> None:
    """Consumers' forwards wait for producers', and producers' backwards for consumers' where a gradient returns."""
    sections = {s.name: s for s in plan.sections}
    for edge in plan.edges:
        gradient = returns_gradient(edge, sections)
        for src, dst in messages[edge.name]:
            jobs["F", edge.src, src].before(jobs["F", edge.dst, dst])
            if gradient:
                jobs["B", edge.dst, dst].before(jobs["B", edge.src, src])
