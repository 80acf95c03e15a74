"""Micro-batches: which samples each replica of each section processes together, and how urgent each micro-batch is.

Samples go to the least loaded replica, largest first; sections on the same ranks are balanced together, so that a sample stays on its
rank. A micro-batch holds samples of one pattern: one that needs no encoder can then start while the encoders fill. The *critical* section
(the largest load per replica) is composed first; the others follow the order in which it will want their samples.
All costs are integer nanoseconds, so that every rank decides alike.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from secc.runtime.expr import evaluate
from secc.runtime.plan import Plan, Section
from secc.runtime.program import MicroBatch, SampleMeta, active, owes_backward, replica_ranks, returns_gradient
from secc.runtime.sizes import combine

Cut = list[tuple[int, tuple[int, ...]]]  # a section's micro-batches: (replica, positions of the samples)


class Costs:
    """Modelled times of sets of samples, evaluated at the sizes they will have in a micro-batch."""

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta]) -> None:
        self._symbols = plan.symbols
        self._widths: dict[str, int] = {}
        if plan.widths == "global":
            total = combine([s.sizes for s in samples], plan.symbols)
            self._widths = {s.name: total[s.name] for s in plan.symbols if s.kind == "width"}
        self._sizes = [{**s.sizes, **self._widths} for s in samples]

    def sizes(self, position: int) -> dict[str, int]:
        """The symbols of the sample at `position` as a micro-batch of its own has them."""
        return self._sizes[position]

    def together(self, positions: Sequence[int]) -> dict[str, int]:
        """The symbols of a micro-batch of the samples at `positions`."""
        if len(positions) == 1:
            return self._sizes[positions[0]]
        return combine([self._sizes[p] for p in positions], self._symbols) | self._widths

    def of(self, section: Section, positions: Sequence[int]) -> tuple[int, int]:
        """(forward, backward) nanoseconds of the samples at `positions` as one micro-batch."""
        sizes = self.together(positions)
        backward = evaluate(section.cost.backward_ns, sizes) if owes_backward(section) else 0
        return evaluate(section.cost.forward_ns, sizes), backward


@dataclass
class Graph:
    """The sections as a graph: producers first, and for each the sections upstream of it."""

    plan: Plan
    order: list[Section] = field(init=False)
    depth: dict[str, int] = field(init=False)
    ancestors: dict[str, set[str]] = field(init=False)  # over all edges
    creditors: dict[str, set[str]] = field(init=False)  # over edges that return a gradient: whose backward waits for this section's

    def __post_init__(self) -> None:
        sections = {s.name: s for s in self.plan.sections}
        self.ancestors = {name: set() for name in sections}
        self.creditors = {name: set() for name in sections}
        self.depth = dict.fromkeys(sections, 0)
        self.order, left = [], list(self.plan.sections)
        while left:
            unplaced = {s.name for s in left}
            ready = [s for s in left if not any(e.dst == s.name and e.src in unplaced for e in self.plan.edges)]
            if not ready:
                raise ValueError(f"the edges between sections {', '.join(sorted(unplaced))} form a cycle")
            self.order += ready
            left = [s for s in left if s not in ready]
        for section in self.order:
            for edge in self.plan.edges:
                if edge.src == section.name:
                    self._connect(edge.src, edge.dst, returns_gradient(edge, sections))

    def _connect(self, src: str, dst: str, gradient: bool) -> None:
        self.depth[dst] = max(self.depth[dst], self.depth[src] + 1)
        self.ancestors[dst] |= {src, *self.ancestors[src]}
        if gradient:
            self.creditors[dst] |= {src, *self.creditors[src]}


@dataclass(frozen=True)
class Urgency:
    """What decides when a micro-batch runs. `wave` 0: its backward is awaited upstream, 1: it only needs upstream, 2: it needs nothing."""

    forward_ns: int
    backward_ns: int
    wave: int
    upstream_ns: int  # backward that becomes possible upstream once this micro-batch's is done
    turn: int  # place in the order in which the critical section wants the samples


@dataclass(frozen=True)
class Composition:
    """Micro-batches of all sections with their urgencies, by micro-batch index, and the critical section's name."""

    micro_batches: dict[str, tuple[MicroBatch, ...]]
    urgency: dict[str, tuple[Urgency, ...]]
    critical: str


class Composer:
    """Deals the samples of one global batch to replicas and cuts them into micro-batches."""

    def __init__(self, plan: Plan, samples: Sequence[SampleMeta], graph: Graph) -> None:
        self.plan, self.samples, self.graph = plan, samples, graph
        self.costs = Costs(plan, samples)
        self.alone = {  # for each section: active sample -> (forward, backward) ns on its own
            s.name: {p: self.costs.of(s, (p,)) for p, sample in enumerate(samples) if active(s.when, sample.pattern)} for s in plan.sections
        }
        self.upstream = {s.name: self._upstream(s) for s in plan.sections}
        self.critical = max(graph.order, key=lambda s: (sum(map(sum, self.alone[s.name].values())) // s.mesh.dp, graph.depth[s.name]))

    def wavefront(self) -> tuple[dict[str, Cut], dict[int, int]]:
        """Micro-batches of balanced replicas, and each sample's turn: when the critical section wants it."""
        dealt = self._deal()
        critical = self.critical.name
        first = self._cut(self.critical, dealt[critical], dict.fromkeys(range(len(self.samples)), 0))
        turns = self._turns(first)
        rest = {s.name: self._cut(s, dealt[s.name], turns) for s in self.plan.sections if s.name != critical}
        return {critical: first, **rest}, turns

    def dataset_order(self) -> tuple[dict[str, Cut], dict[int, int]]:
        """Micro-batches of consecutive samples, dealt to the replicas in turn."""
        cuts: dict[str, Cut] = {}
        for s in self.plan.sections:
            positions = list(self.alone[s.name])
            chunks = [tuple(positions[i : i + s.micro_batch]) for i in range(0, len(positions), s.micro_batch)]
            cuts[s.name] = [(i % s.mesh.dp, chunk) for i, chunk in enumerate(chunks)]
        return cuts, {p: p for p in range(len(self.samples))}

    def urgency(self, section: Section, positions: Sequence[int], turns: dict[int, int]) -> Urgency:
        """The urgency of a micro-batch."""
        forward, backward = self.costs.of(section, positions)
        upstream = sum(self.upstream[section.name][p] for p in positions)
        return Urgency(forward, backward, min(self._wave(section, p) for p in positions), upstream, min(turns[p] for p in positions))

    def _upstream(self, section: Section) -> dict[int, int]:
        """For each active sample, the backward that waits upstream for this section's."""
        waiting = [self.alone[name] for name in self.graph.creditors[section.name]]
        return {p: sum(costs[p][1] for costs in waiting if p in costs) for p in self.alone[section.name]}

    def _wave(self, section: Section, position: int) -> int:
        if any(position in self.alone[name] for name in self.graph.creditors[section.name]):
            return 0
        return 1 if any(position in self.alone[name] for name in self.graph.ancestors[section.name]) else 2

    def _deal(self) -> dict[str, list[list[int]]]:
        """For each section the samples of each replica: largest first, each to the least loaded. Sections of the same ranks deal alike."""
        groups: dict[tuple[int, ...], list[Section]] = defaultdict(list)
        for s in self.plan.sections:
            groups[replica_ranks(s)].append(s)
        weights = {ranks: self._weights(sections) for ranks, sections in groups.items()}
        load: dict[int, int] = defaultdict(int)
        dealt: dict[str, list[list[int]]] = {}
        for ranks in sorted(groups, key=lambda ranks: (-sum(weights[ranks].values()) // len(ranks), ranks)):
            owner = self._balance(ranks, weights[ranks], load)
            for s in groups[ranks]:
                dealt[s.name] = [[] for _ in ranks]
                for p in self.alone[s.name]:
                    dealt[s.name][owner[p]].append(p)
        return dealt

    def _weights(self, sections: Iterable[Section]) -> dict[int, int]:
        total: dict[int, int] = defaultdict(int)
        for s in sections:
            for p, (forward, backward) in self.alone[s.name].items():
                total[p] += forward + backward
        return total

    def _balance(self, ranks: tuple[int, ...], weights: dict[int, int], load: dict[int, int]) -> dict[int, int]:
        """The replica of each sample. `load` is what the ranks do already; this work is added to it."""
        owner: dict[int, int] = {}
        heap = [(load[rank], 0, r) for r, rank in enumerate(ranks)]
        heapq.heapify(heap)
        # Samples of equal weight are taken pattern by pattern, so that each replica gets its share of every pattern.
        for p in sorted(weights, key=lambda p: (-weights[p], sorted(self.samples[p].pattern), p)):
            busy, count, r = heap[0]
            heapq.heapreplace(heap, (busy + weights[p], count + 1, r))
            owner[p] = r
        for busy, _, r in heap:
            load[ranks[r]] = busy
        return owner

    def _cut(self, section: Section, dealt: list[list[int]], turns: dict[int, int]) -> Cut:
        """Even micro-batches of one pattern each: by turn, and within a turn the largest together, which wastes the least padding."""
        alone, upstream, cut = self.alone[section.name], self.upstream[section.name], []
        for r, positions in enumerate(dealt):
            groups: dict[frozenset[str], list[int]] = defaultdict(list)
            for p in sorted(positions, key=lambda p: (turns[p], -upstream[p], -sum(alone[p]), p)):
                groups[self.samples[p].pattern].append(p)
            for group in groups.values():
                count = -(-len(group) // section.micro_batch)
                bounds = [i * len(group) // count for i in range(count + 1)]
                cut += [(r, tuple(group[a:b])) for a, b in pairwise(bounds)]
        return cut

    def _turns(self, cut: Cut) -> dict[int, int]:
        """Each sample's place in the critical section's order: first the first micro-batch of every replica that needs upstream, ..."""
        critical, queues = self.critical, defaultdict(list)
        for replica, positions in cut:
            u = self.urgency(critical, positions, dict.fromkeys(positions, 0))
            queues[replica].append((u.wave, -u.upstream_ns, -u.forward_ns - u.backward_ns, positions))
        turns = dict.fromkeys(range(len(self.samples)), len(self.samples))
        for replica, queue in queues.items():
            for k, (wave, *_, positions) in enumerate(sorted(queue)):
                turns |= dict.fromkeys(positions, (wave * len(self.samples) + k) * critical.mesh.dp + replica)
        return turns


def compose(plan: Plan, samples: Sequence[SampleMeta], graph: Graph, order: str) -> Composition:
    """The micro-batches of one global batch. `order`: "wavefront", or "dataset" to take the samples as they come."""
    composer = Composer(plan, samples, graph)
    cuts, turns = composer.wavefront() if order == "wavefront" else composer.dataset_order()
    micros = {
        s.name: tuple(MicroBatch(i, s.name, r, tuple(sorted(positions))) for i, (r, positions) in enumerate(cuts[s.name]))
        for s in plan.sections
    }
    urgency = {s.name: tuple(composer.urgency(s, m.samples, turns) for m in micros[s.name]) for s in plan.sections}
    return Composition(micros, urgency, composer.critical.name)
