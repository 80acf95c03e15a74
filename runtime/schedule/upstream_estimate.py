"""What the planner of a critical pipeline (`pipeline_order`) must know about a step: its micro-batches, and
estimates of when upstream sections deliver their inputs and finish their backwards.

The estimate assumes that each rank takes micro-batches in the order in which their first samples are wanted
and runs all forwards before the first backward, as sections that feed other ranks do; then backwards as they
become possible. Samples pass the sections in topological order, and back. Micro-batches of several samples
are cut as the step would cut them. In-flight limits and prefetched work are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
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
from secc.runtime.schedule.pipeline_order import DrainEstimate, PipelineLoad
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
        estimate_upstream=upstream.estimate_times,
        upstream_work_ns=upstream.most_work_ns(),
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


class _Visit(NamedTuple):
    """A micro-batch in an upstream section: its rank, ns, samples, and the pipeline's micro-batches that
    these are in."""

    rank: int
    forward_ns: int
    backward_ns: int
    samples: SamplePositions
    consumers: tuple[int, ...]


class _UpstreamSection(NamedTuple):
    """A section upstream of a pipeline: whether it feeds the pipeline directly, and the names of the upstream
    sections that its inputs (`sources`) and its gradients (`gradient_sources`) come from."""

    section: Section
    feeds_pipeline: bool
    sources: Sequence[str]
    gradient_sources: Sequence[str]


VisitsBySection = Mapping[str, Sequence[_Visit]]


class _UpstreamEstimate:
    """The sections upstream of a pipeline with these micro-batches; `sections` are in topological order."""

    def __init__(
        self,
        composer: MicroBatchComposer,
        stages: Sequence[Section],
        micro_batches: Sequence[SamplePositions],
    ) -> None:
        self.composer, self.micro_batch_count = composer, len(micro_batches)
        graph, edges = composer.graph, composer.plan.edges
        names = graph.exclude_own_stages(
            stages[0].name, set().union(*(graph.ancestors[s.name] for s in stages))
        )
        sections = {s.name: s for s in composer.plan.sections}
        feeding = {e.src for e in edges if e.dst in {s.name for s in stages}}
        self.sections = {
            s.name: _UpstreamSection(
                s,
                s.name in feeding,
                [e.src for e in edges if e.dst == s.name and e.src in names],
                [
                    e.dst
                    for e in edges
                    if e.src == s.name and e.dst in names and returns_gradient(e, sections)
                ],
            )
            for s in graph.topological_order
            if s.name in names
        }
        self.consumer_of = {p: m for m, samples in enumerate(micro_batches) for p in samples}
        # Single samples are the same micro-batches in any order.
        self.single_visits: tuple[VisitsBySection, DrainEstimate] | None = None
        if all(s.section.most_samples == 1 for s in self.sections.values()):
            self.single_visits = self._cut_visits([0] * composer.sample_count)

    def most_work_ns(self) -> int:
        """Returns what the busiest rank has to do."""
        work: dict[int, int] = {}
        for name, s in self.sections.items():
            shares = self.composer.shared_work[name]
            assigned = self.composer.assignment.samples_by_replica[name]
            for rank, samples in zip(replica_first_ranks(s.section), assigned, strict=True):
                work[rank] = work.get(rank, 0) + sum(map(shares.__getitem__, samples))
        return max(work.values(), default=0)

    def estimate_times(self, wanted_starts: Sequence[int]) -> tuple[list[int], DrainEstimate]:
        """Estimates when each of the pipeline's micro-batches has its inputs, in ns, if upstream takes
        samples by their wanted start times; also returns the estimate of when its last backward ends."""
        count, start_times = self.composer.sample_count, [0] * self.composer.sample_count
        for p, m in self.consumer_of.items():
            start_times[p] = wanted_starts[m]
        visits, drained = self.single_visits or self._cut_visits(start_times)
        place = [count] * count
        for i, p in enumerate(sorted(self.consumer_of, key=lambda p: (start_times[p], p))):
            place[p] = i
        first = {name: [min(map(place.__getitem__, v.samples)) for v in own] for name, own in visits.items()}
        sources = {name: s.sources for name, s in self.sections.items()}
        clock: dict[int, int] = {}
        ends = {name: [0] * count for name in visits}
        ready = [0] * self.micro_batch_count
        for name, v in _order_visits(visits, first, sources, count):
            start = clock.get(v.rank, 0)
            for source in sources[name]:
                start = max(start, *map(ends[source].__getitem__, v.samples))
            clock[v.rank] = end = start + v.forward_ns
            for p in v.samples:
                ends[name][p] = end
            for m in v.consumers if self.sections[name].feeds_pipeline else ():
                ready[m] = max(ready[m], end)
        return ready, drained

    def _cut_visits(self, start_times: Sequence[int]) -> tuple[VisitsBySection, DrainEstimate]:
        """Cuts micro-batches of all sections by the samples' start times; also returns the estimate of when
        their backwards end."""
        visits: dict[str, list[_Visit]] = {}
        forward_work: dict[int, int] = {}  # what each rank does before its first backward
        for name, s in self.sections.items():
            cut, ranks = self.composer.cut_section(s.section, start_times), replica_first_ranks(s.section)
            times = self.composer.micro_batch_times(s.section, [samples for _, samples in cut])
            visits[name] = []
            for (replica, samples), forward_ns, backward_ns in zip(cut, *times, strict=True):
                consumers = tuple({m: None for p in samples if (m := self.consumer_of.get(p)) is not None})
                visits[name].append(_Visit(ranks[replica], forward_ns, backward_ns, samples, consumers))
                forward_work[ranks[replica]] = forward_work.get(ranks[replica], 0) + forward_ns
        owing = {
            name: [v for v in visits[name] if v.backward_ns and v.consumers] for name in reversed(visits)
        }
        if (
            all(len(v.consumers) == 1 for own in owing.values() for v in own)
            and sum(map(bool, owing.values())) < 2
        ):
            simple = [(v.consumers[0], v.rank, v.backward_ns) for v in chain.from_iterable(owing.values())]
            return visits, partial(_end_single_backwards, forward_work, simple)
        return visits, partial(self._end_backwards, forward_work, owing)

    def _end_backwards(
        self, forward_work: Mapping[int, int], owing: VisitsBySection, arrivals: Sequence[int]
    ) -> int:
        """Estimates when upstream ends the backwards of these visits; their order hardly matters."""
        clock = dict(forward_work)
        arrived = {name: [max(arrivals[m] for m in v.consumers) for v in own] for name, own in owing.items()}
        sources = {name: s.gradient_sources for name, s in self.sections.items()}
        ends = {name: [0] * self.composer.sample_count for name in owing}
        for name, v in _order_visits(owing, arrived, sources, self.composer.sample_count):
            start = max(clock[v.rank], *(arrivals[m] for m in v.consumers))
            for source in sources[name]:
                start = max(start, *map(ends[source].__getitem__, v.samples))
            clock[v.rank] = end = start + v.backward_ns
            for p in v.samples:
                ends[name][p] = end
        return max(clock.values(), default=0)


def _end_single_backwards(
    forward_work: Mapping[int, int], backwards: Sequence[tuple[int, int, int]], arrivals: Sequence[int]
) -> int:
    """Estimates when upstream ends its backwards, each given as (the pipeline's micro-batch that it waits
    for, rank, ns). Estimates are asked for often."""
    clock = dict(forward_work)
    for m, rank, ns in sorted(backwards, key=lambda visit: arrivals[visit[0]]):
        start = clock[rank]
        clock[rank] = (arrivals[m] if arrivals[m] > start else start) + ns
    return max(clock.values(), default=0)


def _order_visits(
    visits: VisitsBySection,
    wanted: Mapping[str, Sequence[int]],
    sources: Mapping[str, Sequence[str]],
    sample_count: int,
) -> Iterator[tuple[str, _Visit]]:
    """Yields (section, visit) in the order in which visits are `wanted`, each behind those of its samples in
    `sources`; the sections of `visits` are in topological order."""
    earliest = {name: [0] * sample_count for name in visits}
    keyed: list[tuple[int, int, str, _Visit]] = []
    for depth, (name, own) in enumerate(visits.items()):
        for v, key in zip(own, wanted[name], strict=True):
            for source in sources[name]:
                key = max(key, *map(earliest[source].__getitem__, v.samples))
            for p in v.samples:
                earliest[name][p] = key
            keyed.append((key, depth, name, v))
    keyed.sort(key=lambda entry: entry[:2])
    return ((name, v) for _, _, name, v in keyed)
