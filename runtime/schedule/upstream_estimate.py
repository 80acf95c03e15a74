"""What the planner of a critical pipeline (`pipeline_order`) must know about a step: its micro-batches, and
estimates of when upstream sections deliver their inputs and finish their backwards.

The estimate assumes that each rank takes samples in the order in which they are wanted and runs all forwards
before the first backward, as sections that feed other ranks do; then backwards as they become possible. A
sample passes the sections in topological order, and back. In-flight limits and prefetched work are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from secc.runtime.plan.schema import Section
from secc.runtime.plan.step_program import (
    owes_backward,
    replica_first_ranks,
    returns_gradient,
    runs_in_lockstep,
    weight_backward_times,
)
from secc.runtime.schedule.batch_packing import SamplePositions
from secc.runtime.schedule.micro_batches import INDEPENDENT, MicroBatchComposer
from secc.runtime.schedule.pipeline_order import PipelineLoad
from secc.runtime.schedule.pipeline_replica_sim import PipelineReplica


def critical_pipeline_load(composer: MicroBatchComposer) -> tuple[PipelineLoad, list[SamplePositions]] | None:
    """Returns the critical section's micro-batches as the planner sees them, and the samples of each.

    Returns None if orders are not planned: without stages or backward, if the section feeds others or shares
    ranks with them, and under ZeRO-3, which needs equally many micro-batches on all replicas.
    """
    stages = composer.graph.pipeline_stages[composer.critical_section.name]
    micro_batches = list(chain.from_iterable(composer.assignment.critical_micro_batches))
    if not micro_batches or not _has_own_ranks(composer, stages):
        return None
    times = [composer.micro_batch_times(s, micro_batches) for s in stages]
    split = [composer.costs.split_backwards(s, micro_batches) for s in stages]
    weight = [
        weight_backward_times(s, backward, parts.whole)
        for s, (_, backward), parts in zip(stages, times, split, strict=True)
    ]
    saved = [composer.costs.saved_bytes(s, micro_batches) for s in stages]
    between = [parts.between_bytes for parts in split]
    if between[-1]:  # the last stage runs a backward right after its forward
        saved[-1], between[-1] = list(map(int.__add__, saved[-1], between[-1])), ()
    replica = PipelineReplica(
        forward_ns=[forward for forward, _ in times],
        backward_ns=[list(map(int.__sub__, b, w)) for (_, b), w in zip(times, weight, strict=True)],
        weight_ns=weight if any(s.weight_permille for s in stages) else (),
        max_in_flight=[s.in_flight for s in stages],
        saved_bytes=saved,
        byte_limits=[s.room_bytes for s in stages],
        rank_of_stage=_rank_of_stage(stages),
        between_bytes=between,
    )
    stage_work = [map(int.__add__, forward, backward) for forward, backward in times]
    owed, classes = composer.upstream_backward_ns[stages[0].name], composer.pattern_classes[stages[-1].name]
    upstream = _UpstreamEstimate(composer, stages, micro_batches)
    load = PipelineLoad(
        replica=replica,
        replica_count=stages[0].mesh.dp,
        work_ns=[sum(ns) // replica.rank_count for ns in zip(*stage_work, strict=True)],
        upstream_ns=[max(owed[p] for p in samples) for samples in micro_batches],
        needs_upstream=[
            any(classes[composer.pattern_ids[p]] != INDEPENDENT for p in samples) for samples in micro_batches
        ],
        estimate_ready=upstream.estimate_ready,
        estimate_drained=upstream.estimate_drained,
        upstream_work_ns=max(upstream.rank_work.values(), default=0),
    )
    return load, micro_batches


def _has_own_ranks(composer: MicroBatchComposer, stages: Sequence[Section]) -> bool:
    """Returns whether stages share no ranks with others, and with each other all or none, have a backward,
    and feed no other section."""
    names = {s.name for s in stages}
    ranks = [r for own in dict.fromkeys(s.mesh.ranks for s in stages) for r in own]
    other_ranks = {r for s in composer.plan.sections if s.name not in names for r in s.mesh.ranks}
    disjoint = len(stages) > 1 and len(set(ranks)) == len(ranks) and other_ranks.isdisjoint(ranks)
    return (
        disjoint
        and owes_backward(stages[0])
        and not any(map(runs_in_lockstep, stages))
        and not any(e.src in names and e.dst not in names for e in composer.plan.edges)
    )


def _rank_of_stage(stages: Sequence[Section]) -> list[int]:
    """Returns the number of each stage's ranks, empty if no stages share them."""
    ranks = list(dict.fromkeys(s.mesh.ranks for s in stages))
    return [ranks.index(s.mesh.ranks) for s in stages] if len(ranks) < len(stages) else []


class _SectionVisit(NamedTuple):
    """A sample in an upstream section: the rank, ns, the upstream sections that it comes from (`sources`) and
    the ones that return a gradient (`gradient_sources`).
    """

    section: str
    rank: int
    forward_ns: int
    backward_ns: int
    sources: set[str]
    gradient_sources: set[str]


class _UpstreamEstimate:
    """The paths of samples through the sections upstream of a pipeline.

    `forward_paths` and `backward_paths` have, by micro-batch, one path of visits per sample, in topological
    order and reversed. `feeding_sections` feed the pipeline directly; `forward_work` is what each rank does
    before its first backward, in ns, and `rank_work` all that it does.
    """

    def __init__(
        self,
        composer: MicroBatchComposer,
        stages: Sequence[Section],
        micro_batches: Sequence[SamplePositions],
    ) -> None:
        graph, edges, self.micro_batch_count = composer.graph, composer.plan.edges, len(micro_batches)
        names = graph.exclude_own_stages(
            stages[0].name, set().union(*(graph.ancestors[s.name] for s in stages))
        )
        sections = {s.name: s for s in composer.plan.sections}
        self.feeding_sections = {e.src for e in edges if e.dst in {s.name for s in stages}} & names
        self.forward_work, self.rank_work = dict[int, int](), dict[int, int]()
        visits: list[list[_SectionVisit]] = [[] for _ in range(composer.sample_count)]
        for s in (s for s in graph.topological_order if s.name in names):
            (forward, backward), ranks = composer.sample_times[s.name], replica_first_ranks(s)
            for rank, rank_samples in zip(ranks, composer.assignment.samples_by_replica[s.name], strict=True):
                self.forward_work[rank] = self.forward_work.get(rank, 0) + sum(
                    map(forward.__getitem__, rank_samples)
                )
                self.rank_work[rank] = self.rank_work.get(rank, 0) + sum(
                    forward[p] + backward[p] for p in rank_samples
                )
            sources = {e.src for e in edges if e.dst == s.name} & names
            gradient_sources = {
                e.dst for e in edges if e.src == s.name and returns_gradient(e, sections)
            } & names
            for replica, positions in enumerate(composer.assignment.samples_by_replica[s.name]):
                for p in positions:
                    visits[p].append(
                        _SectionVisit(
                            s.name, ranks[replica], forward[p], backward[p], sources, gradient_sources
                        )
                    )
        forward_paths = {
            m: [path for p in samples if (path := visits[p])] for m, samples in enumerate(micro_batches)
        }
        backward_paths = {
            m: [path for p in samples if (path := [v for v in reversed(visits[p]) if v.backward_ns])]
            for m, samples in enumerate(micro_batches)
        }
        self.forward_paths, self.backward_paths = (
            {m: paths for m, paths in by_micro_batch.items() if paths}
            for by_micro_batch in (forward_paths, backward_paths)
        )
        paths = [(m, path) for m, paths in self.backward_paths.items() for path in paths]
        # (micro-batch, rank, ns) of each sample's backward if all have one; estimates are asked for often.
        self.single_backwards = (
            [(m, v.rank, v.backward_ns) for m, (v,) in paths] if all(len(p) == 1 for _, p in paths) else None
        )

    def estimate_ready(self, wanted_starts: Sequence[int]) -> list[int]:
        """Estimates when each micro-batch has its inputs, in ns, if upstream takes micro-batches by their
        wanted start times.
        """
        clock: dict[int, int] = {}
        ready = [0] * self.micro_batch_count
        for m in sorted(self.forward_paths, key=wanted_starts.__getitem__):
            for path in self.forward_paths[m]:
                section_ends: dict[str, int] = {}
                for v in path:
                    start = clock.get(v.rank, 0)
                    for source in v.sources:
                        start = max(start, section_ends.get(source, 0))
                    clock[v.rank] = section_ends[v.section] = start + v.forward_ns
                    if v.section in self.feeding_sections:
                        ready[m] = max(ready[m], section_ends[v.section])
        return ready

    def estimate_drained(self, arrivals: Sequence[int]) -> int:
        """Estimates when upstream ends its last backward, given when each micro-batch's gradients arrive; the
        order hardly matters.
        """
        clock = self.forward_work.copy()
        if self.single_backwards is not None:
            for m, rank, ns in sorted(self.single_backwards, key=lambda visit: arrivals[visit[0]]):
                start = clock[rank]
                clock[rank] = (arrivals[m] if arrivals[m] > start else start) + ns
            return max(clock.values(), default=0)
        for m in sorted(self.backward_paths, key=arrivals.__getitem__):
            for path in self.backward_paths[m]:
                section_ends: dict[str, int] = {}
                for v in path:
                    start = max(clock[v.rank], arrivals[m])
                    for source in v.gradient_sources:
                        start = max(start, section_ends.get(source, 0))
                    clock[v.rank] = section_ends[v.section] = start + v.backward_ns
        return max(clock.values(), default=0)
