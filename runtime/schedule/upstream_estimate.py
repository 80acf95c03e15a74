"""What a critical pipeline's planner (`runtime/schedule/pipeline_order.py`) must know of a step: its
micro-batches, and when upstream has what they need.

Upstream's times are guessed: each rank takes samples in the order in which they are wanted, and does all
forwards before the first backward, as sections upstream of other ranks do; then backwards as they become
possible. A sample passes the sections in the order of the graph, and back. What a section may hold
(`in_flight`) and what was computed ahead are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from secc.runtime.plan.schema import Section
from secc.runtime.plan.step_program import (
    gathers_parameters,
    owes_backward,
    replica_first_ranks,
    returns_gradient,
    weight_backward_times,
)
from secc.runtime.schedule.batch_packing import SamplePositions
from secc.runtime.schedule.micro_batches import INDEPENDENT, MicroBatchComposer
from secc.runtime.schedule.pipeline_order import PipelineLoad
from secc.runtime.schedule.pipeline_replica_sim import PipelineReplica


def critical_pipeline_load(composer: MicroBatchComposer) -> tuple[PipelineLoad, list[SamplePositions]] | None:
    """The critical section's micro-batches as the planner sees them, and the samples of each.

    None where queues are not planned: without stages or backward, where it feeds other sections or shares
    ranks with some, and where all replicas must run equally many micro-batches.
    """
    stages = composer.graph.pipeline_stages[composer.critical_section.name]
    lots = list(chain.from_iterable(composer.assignment.critical_micro_batches))
    if not lots or not _has_own_ranks(composer, stages):
        return None
    times = [composer.micro_batch_times(s, lots) for s in stages]
    later = [weight_backward_times(s, backward) for s, (_, backward) in zip(stages, times, strict=True)]
    first = [
        list(map(int.__sub__, backward, weight)) for (_, backward), weight in zip(times, later, strict=True)
    ]
    kept, spaces = [composer.costs.saved_bytes(s, lots) for s in stages], [s.room_bytes for s in stages]
    lane = PipelineReplica(
        [f for f, _ in times],
        first,
        later if any(s.weight_permille for s in stages) else (),
        [s.in_flight for s in stages],
        kept,
        spaces,
    )
    size = [sum(ns) // len(stages) for ns in zip(*(map(int.__add__, f, b) for f, b in times), strict=True)]
    owed, waves = composer.upstream_backward_ns[stages[0].name], composer.pattern_classes[stages[-1].name]
    needs = [any(waves[composer.pattern_ids[p]] != INDEPENDENT for p in lot) for lot in lots]
    upstream = _UpstreamEstimate(composer, stages, lots)
    return PipelineLoad(
        lane,
        stages[0].mesh.dp,
        size,
        [max(owed[p] for p in lot) for lot in lots],
        needs,
        upstream.estimate_ready,
        upstream.estimate_drained,
    ), lots


def _has_own_ranks(composer: MicroBatchComposer, stages: Sequence[Section]) -> bool:
    """Whether stages have ranks of their own, and pass nothing on."""
    names, ranks = {s.name for s in stages}, [r for s in stages for r in s.mesh.ranks]
    others = {r for s in composer.plan.sections if s.name not in names for r in s.mesh.ranks}
    apart = len(stages) > 1 and len(set(ranks)) == len(ranks) and others.isdisjoint(ranks)
    return (
        apart
        and owes_backward(stages[0])
        and not any(map(gathers_parameters, stages))
        and not any(e.src in names and e.dst not in names for e in composer.plan.edges)
    )


class _SectionVisit(NamedTuple):
    """A sample in a section upstream: its rank, its times, and the sections that it comes from and whose
    backwards it waits for."""

    section: str
    rank: int
    forward_ns: int
    backward_ns: int
    sources: set[str]
    gradient_sources: set[str]


class _UpstreamEstimate:
    """The sections upstream of a pipeline, which of them feed it, and the ways of its micro-batches' samples
    through them: `there` in the order of the graph, and `back`."""

    def __init__(
        self, composer: MicroBatchComposer, stages: Sequence[Section], lots: Sequence[SamplePositions]
    ) -> None:
        graph, edges, self.micro_batch_count = composer.graph, composer.plan.edges, len(lots)
        names = graph.exclude_own_stages(
            stages[0].name, set().union(*(graph.ancestors[s.name] for s in stages))
        )
        sections = {s.name: s for s in composer.plan.sections}
        self.feeding_sections = {e.src for e in edges if e.dst in {s.name for s in stages}} & names
        self.forward_work: dict[int, int] = {}  # the work that each rank does before its first backward
        visits: list[list[_SectionVisit]] = [[] for _ in range(composer.sample_count)]
        for s in (s for s in graph.topological_order if s.name in names):
            (forward, backward), ranks = composer.sample_times[s.name], replica_first_ranks(s)
            for rank, dealt in zip(ranks, composer.assignment.samples_by_replica[s.name], strict=True):
                self.forward_work[rank] = self.forward_work.get(rank, 0) + sum(
                    map(forward.__getitem__, dealt)
                )
            sources = {e.src for e in edges if e.dst == s.name} & names
            awaited = {e.dst for e in edges if e.src == s.name and returns_gradient(e, sections)} & names
            for replica, positions in enumerate(composer.assignment.samples_by_replica[s.name]):
                for p in positions:
                    visits[p].append(
                        _SectionVisit(s.name, ranks[replica], forward[p], backward[p], sources, awaited)
                    )
        there = {m: [way for p in lot if (way := visits[p])] for m, lot in enumerate(lots)}
        back = {
            m: [way for p in lot if (way := [v for v in reversed(visits[p]) if v.backward_ns])]
            for m, lot in enumerate(lots)
        }
        self.forward_paths, self.backward_paths = (
            {m: ways for m, ways in some.items() if ways} for some in (there, back)
        )

    def estimate_ready(self, wanted: Sequence[int]) -> list[int]:
        """When each micro-batch has what it needs, if upstream takes them as they are wanted."""
        clock: dict[int, int] = {}
        found = [0] * self.micro_batch_count
        for m in sorted(self.forward_paths, key=wanted.__getitem__):
            for way in self.forward_paths[m]:
                done: dict[str, int] = {}
                for v in way:
                    start = clock.get(v.rank, 0)
                    for source in v.sources:
                        start = max(start, done.get(source, 0))
                    clock[v.rank] = done[v.section] = start + v.forward_ns
                    if v.section in self.feeding_sections:
                        found[m] = max(found[m], done[v.section])
        return found

    def estimate_drained(self, backs: Sequence[int]) -> int:
        """When upstream has done its backwards, if each micro-batch's come from the pipeline at these times;
        the order hardly matters."""
        clock = self.forward_work.copy()
        for m in sorted(self.backward_paths, key=backs.__getitem__):
            for way in self.backward_paths[m]:
                done: dict[str, int] = {}
                for v in way:
                    start = max(clock[v.rank], backs[m])
                    for then in v.gradient_sources:
                        start = max(start, done.get(then, 0))
                    clock[v.rank] = done[v.section] = start + v.backward_ns
        return max(clock.values(), default=0)
