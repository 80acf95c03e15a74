"""From the IR and a cluster to the solver's problem: each section's candidates with their times and memory, and what edges cost.

Expected load: a global batch holds `global_batch x share` samples of each pattern, and the busiest of dp replicas gets the dp-th part of
the active ones, rounded up. A micro-batch holds samples of one pattern, as the wavefront composes them, at the pattern's mean sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from secc.alloc.pins import Pins
from secc.alloc.types import Candidate, Edge, Problem
from secc.cluster import Cluster
from secc.cost import time
from secc.cost.load import Crossing, Pattern, crossings, is_active, micro_batch, patterns
from secc.cost.memory import memory
from secc.cost.section import SectionCost, section_cost
from secc.errors import UserError
from secc.ir.dialect import GraphOp, SectionOp
from secc.runtime.expr import evaluate

IN_TURN = 2  # micro-batches in flight of a section whose consumers share its ranks: one waits for them while the next runs


@dataclass(frozen=True)
class Load:
    """A section as the cost model sees it: its cost, times as texts, and the patterns it is active for."""

    section: SectionOp
    mode: str
    cost: SectionCost
    forward_ns: str
    backward_ns: str
    label: str
    active: tuple[Pattern, ...]

    @property
    def name(self) -> str:
        return self.section.sym.data

    @property
    def share(self) -> Fraction:
        """The share of samples for which the section is active."""
        return sum((p.share for p in self.active), Fraction(0))


@dataclass(frozen=True)
class Workload:
    """Everything that candidates are made from."""

    graph: GraphOp
    cluster: Cluster
    global_batch: int
    loads: dict[str, Load]
    crossings: tuple[Crossing, ...]

    def samples(self, load: Load) -> int:
        """Active samples of a section in a global batch, as expected and rounded up; at least 1."""
        return max(1, ceil(self.global_batch * load.share))

    def usable_ranks(self, strategy: str) -> int:
        """The most ranks that can all have work."""
        counts = [self.samples(load) for load in self.loads.values()]
        return max(counts) if strategy in {"colocate", "uniform"} else sum(counts)


def workload(graph: GraphOp, cluster: Cluster, global_batch: int) -> Workload:
    """Costs and expected loads of the graph's sections, producers first."""
    found = tuple(crossings(graph))
    seen = patterns(graph)
    loads = {name: _load(graph, section, cluster, seen) for name, section in _ordered(graph, found)}
    return Workload(graph, cluster, global_batch, loads, found)


def _load(graph: GraphOp, section: SectionOp, cluster: Cluster, seen: list[Pattern]) -> Load:
    cost, device = section_cost(graph, section), cluster.device
    mode = section.mode.data if section.mode is not None else "train"
    active = tuple(p for p in seen if is_active(section, p))
    forward, backward = time.forward_ns(cost, device), time.backward_ns(cost, mode, device)
    return Load(section, mode, cost, forward, backward, time.label(cost, device), active)


def _ordered(graph: GraphOp, edges: Iterable[Crossing]) -> list[tuple[str, SectionOp]]:
    left = {s.sym.data: s for s in graph.sections}
    placed: list[tuple[str, SectionOp]] = []
    while left:
        ready = [name for name in left if not any(e.dst == name and e.src in left for e in edges)]
        if not ready:
            raise UserError(
                f"sections {', '.join(sorted(left))} feed each other in a circle",
                remedy="let coarsen make them one section: name their blocks together",
            )
        placed += [(name, left.pop(name)) for name in ready]
    return placed


def problem(work: Workload, ranks: int, strategy: str, pins: Pins) -> Problem:
    """The solver's problem for `ranks` devices. Raises UserError for pins that leave a section without a candidate."""
    sections = {name: _candidates(work, load, ranks, pins) for name, load in work.loads.items()}
    edges = tuple(_edge(work, c, sections) for c in work.crossings)
    return Problem(sections, edges, ranks, work.cluster.device.usable, strategy, pins.together, work.cluster.per_node)


def _candidates(work: Workload, load: Load, ranks: int, pins: Pins) -> tuple[Candidate, ...]:
    found: list[Candidate] = []
    for dp in pins.dp(load.name, min(ranks, work.global_batch)):
        share = -(-work.samples(load) // dp)
        found += [candidate(work, load, dp, size) for size in pins.micro_batch(load.name, share)]
    return tuple(found)


def candidate(work: Workload, load: Load, dp: int, size: int) -> Candidate:
    """The times and memory of a section in `dp` replicas with micro-batches of `size` samples."""
    busiest = Fraction(-(-work.samples(load) // dp))
    total, count, fill, drain = Fraction(0), Fraction(0), 0, 0
    for pattern in load.active:
        samples = busiest * pattern.share / load.share
        alike = min(size, ceil(samples))
        forward, backward = _times(work, load, pattern, alike)
        total += samples / alike * (forward + backward)
        count += samples / alike
        fill, drain = max(fill, forward), max(drain, backward)
    device, cost = work.cluster.device, load.cost
    step = time.reduce_ns(cost.trainable_bytes, dp, work.cluster) + time.optimizer_ns(cost, device) if load.mode == "train" else 0
    micro_batches = max(1, ceil(count))
    room = memory(cost, max((_activation(work, load, p, size) for p in load.active), default=0))
    in_turn = min(micro_batches, IN_TURN if any(c.src == load.name for c in work.crossings) else 1)
    return Candidate(
        dp=dp,
        micro_batch=size,
        time_ns=ceil(total) + step,
        fill_ns=fill,
        drain_ns=drain,
        micro_batches=micro_batches,
        memory=room.total(in_turn),
        memory_ahead=room.total(in_turn if load.mode == "forward" else micro_batches),
    )


def _times(work: Workload, load: Load, pattern: Pattern, samples: int) -> tuple[int, int]:
    sizes = micro_batch(work.graph, pattern.sizes, samples)
    return evaluate(load.forward_ns, sizes), evaluate(load.backward_ns, sizes)


def _activation(work: Workload, load: Load, pattern: Pattern, samples: int) -> int:
    """Bytes that a micro-batch keeps: what backward needs, and the tensors that come in and go out."""
    sizes = micro_batch(work.graph, pattern.sizes, samples)
    ends = sum(evaluate(c.size, sizes) for c in work.crossings if load.name in (c.src, c.dst))
    return evaluate(load.cost.saved, sizes) + ends


def _edge(work: Workload, crossing: Crossing, sections: dict[str, tuple[Candidate, ...]]) -> Edge:
    src, dst = work.loads[crossing.src], work.loads[crossing.dst]
    gradient = crossing.grad and src.mode != "forward" and dst.mode != "forward"
    directions = 2 if gradient else 1
    free = _independent(src, dst)
    message = {c.micro_batch: _message(work, crossing, src, c.micro_batch) for c in sections[crossing.src]}
    batch = [micro_batch(work.graph, p.sizes, ceil(work.global_batch * p.share)) for p in src.active]
    total = sum(evaluate(crossing.size, sizes) for sizes in batch)
    latency = work.cluster.link(work.cluster.ranks).latency_ns
    return Edge(
        src=crossing.src,
        dst=crossing.dst,
        sent=tuple(-(-total // c.dp) for c in sections[crossing.src]),
        returned=tuple(-(-gradient * total // c.dp) for c in sections[crossing.dst]),
        latency=tuple(c.fill_ns + gradient * c.drain_ns + directions * message[c.micro_batch] for c in sections[crossing.src]),
        slack=tuple((c.micro_batches - 1) * c.drain_ns for c in sections[crossing.src]),
        free=tuple(int(free * c.time_ns) for c in sections[crossing.dst]),
        messages=tuple(directions * latency * c.micro_batches for c in sections[crossing.dst]),
        round=tuple(c.fill_ns + c.drain_ns for c in sections[crossing.dst]),
    )


def _independent(src: Load, dst: Load) -> Fraction:
    """The share of dst's samples that need nothing of src."""
    alone = sum((p.share for p in dst.active if p not in src.active), Fraction(0))
    return alone / dst.share if dst.share else Fraction(0)


def _message(work: Workload, crossing: Crossing, src: Load, samples: int) -> int:
    """Time to send one micro-batch's tensors, at the largest pattern."""
    sizes = [evaluate(crossing.size, micro_batch(work.graph, p.sizes, samples)) for p in src.active]
    return time.message_ns(max(sizes, default=0), work.cluster)
