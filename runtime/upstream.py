"""What a critical pipeline's planner (`runtime/queues.py`) must know of a step: its micro-batches, and when upstream has what they need.

Upstream's times are guessed: each rank takes samples in the order in which they are wanted, a sample passes the sections in the order of
the graph, and only forwards count, because sections upstream of other ranks do all of them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from secc.runtime.compose import FREE, Composer
from secc.runtime.lane import Lane
from secc.runtime.lots import Lot
from secc.runtime.plan import Section
from secc.runtime.program import gathers, owes_backward, replica_ranks, weight_parts
from secc.runtime.queues import Load


def critical_load(composer: Composer) -> tuple[Load, list[Lot]] | None:
    """The critical section's micro-batches as the planner sees them, and the samples of each.

    None where queues are not planned: without stages or backward, where it feeds other sections or shares ranks with some, and where all
    replicas must run equally many micro-batches.
    """
    stages = composer.graph.stages[composer.critical.name]
    lots = list(chain.from_iterable(composer.dealt.critical))
    if not lots or not _apart(composer, stages):
        return None
    times = [composer.costs.of(s, lots) for s in stages]
    later = [weight_parts(s, backward) for s, (_, backward) in zip(stages, times, strict=True)]
    first = [list(map(int.__sub__, backward, weight)) for (_, backward), weight in zip(times, later, strict=True)]
    lane = Lane([f for f, _ in times], first, later if stages[0].weight_permille else (), [s.in_flight for s in stages])
    size = [sum(ns) // len(stages) for ns in zip(*(map(int.__add__, f, b) for f, b in times), strict=True)]
    owed, waves = composer.upstream[stages[0].name], composer.waves[stages[-1].name]
    needs = [any(waves[composer.kind[p]] != FREE for p in lot) for lot in lots]
    ready = _Upstream(composer, stages, lots).ready
    return Load(lane, stages[0].mesh.dp, size, [max(owed[p] for p in lot) for lot in lots], needs, ready), lots


def _apart(composer: Composer, stages: Sequence[Section]) -> bool:
    """Whether stages have ranks of their own, and pass nothing on."""
    names, ranks = {s.name for s in stages}, [r for s in stages for r in s.mesh.ranks]
    others = {r for s in composer.plan.sections if s.name not in names for r in s.mesh.ranks}
    apart = len(stages) > 1 and len(set(ranks)) == len(ranks) and others.isdisjoint(ranks)
    return (
        apart
        and owes_backward(stages[0])
        and not any(map(gathers, stages))
        and not any(e.src in names and e.dst not in names for e in composer.plan.edges)
    )


class _Upstream:
    """The sections upstream of a pipeline, each sample's rank there, and its time."""

    def __init__(self, composer: Composer, stages: Sequence[Section], lots: Sequence[Lot]) -> None:
        graph, self.lots, self.count = composer.graph, lots, composer.count
        names = graph.outside(stages[0].name, set().union(*(graph.ancestors[s.name] for s in stages)))
        sections = [s for s in graph.order if s.name in names]
        sources = {s.name: {e.src for e in composer.plan.edges if e.dst == s.name} & names for s in sections}
        self.last = {e.src for e in composer.plan.edges if e.dst in {s.name for s in stages}} & names
        self.passed: list[list[tuple[str, int, int, set[str]]]] = [[] for _ in range(composer.count)]  # section, rank, ns, sources
        for s in sections:
            forward, ranks = composer.alone[s.name][0], replica_ranks(s)
            for replica, positions in enumerate(composer.dealt.positions[s.name]):
                for p in positions:
                    self.passed[p].append((s.name, ranks[replica], forward[p], sources[s.name]))

    def ready(self, wanted: Sequence[int]) -> list[int]:
        """When each micro-batch has what it needs, if upstream takes them as they are wanted."""
        clock: dict[int, int] = {}
        found = [0] * len(self.lots)
        for m in sorted(range(len(self.lots)), key=wanted.__getitem__):
            for p in self.lots[m]:
                done: dict[str, int] = {}
                for name, rank, ns, sources in self.passed[p]:
                    start = max([clock.get(rank, 0), *(done.get(s, 0) for s in sources)])
                    clock[rank] = done[name] = start + ns
                    if name in self.last:
                        found[m] = max(found[m], done[name])
        return found
