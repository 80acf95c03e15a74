"""From the IR and a cluster to the solver's problem: each section's candidates with their times and memory, and what edges cost.

Expected load: a global batch holds `global_batch x share` samples of each pattern, and the busiest of dp replicas gets the dp-th part of
the active ones, rounded up. A micro-batch holds samples of one pattern, as the wavefront composes them, at the pattern's mean sizes.
Layouts, sizes and ways to run that no other one beats are candidates (`secc.alloc.layouts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil

from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, StringAttr

from secc.alloc import layouts
from secc.alloc.pins import WORDS, Pins
from secc.alloc.types import Candidate, Edge, Problem
from secc.cluster import Cluster
from secc.cost import parallel, time
from secc.cost.load import Crossing, Pattern, crossings, is_active, micro_batch, patterns
from secc.cost.memory import Memory, memory
from secc.cost.section import SectionCost, section_cost
from secc.errors import UserError
from secc.ir.dialect import GraphOp, SectionOp, strings
from secc.runtime.expr import evaluate
from secc.runtime.sends import SENDS

IN_TURN = 2  # micro-batches in flight of a section whose consumers share its ranks: one waits for them while the next runs


@dataclass(frozen=True)
class Load:
    """A section as the cost model sees it: its cost, times as texts, and the patterns it is active for.

    `backward_ns` has a text for each way to recompute. With `tp` and `pp`, cost and times are those of one rank of a replica. `memo` keeps
    what the texts gave.
    """

    section: SectionOp
    mode: str
    cost: SectionCost
    forward_ns: str
    backward_ns: Mapping[str, str]
    label: str
    active: tuple[Pattern, ...]
    tp: int = 1
    pp: int = 1
    memo: dict[object, tuple[int, int]] = field(init=False, repr=False, compare=False, default_factory=dict[object, tuple[int, int]])

    @property
    def name(self) -> str:
        return self.section.sym.data

    @property
    def share(self) -> Fraction:
        """The share of samples for which the section is active."""
        return sum((p.share for p in self.active), Fraction(0))

    def under(self, recompute: str) -> SectionCost:
        """The cost with what is saved where some of it is recomputed."""
        again = self.cost.again.get(recompute)
        return self.cost if again is None else replace(self.cost, saved=again.saved)


@dataclass(frozen=True)
class Workload:
    """Everything that candidates are made from. `unshardable` says why the user's optimizer cannot be sharded, "" if it can."""

    graph: GraphOp
    cluster: Cluster
    global_batch: int
    loads: dict[str, Load]
    crossings: tuple[Crossing, ...]
    unshardable: str = ""

    def samples(self, load: Load) -> int:
        """Active samples of a section in a global batch, as expected and rounded up; at least 1."""
        return max(1, ceil(self.global_batch * load.share))


def workload(graph: GraphOp, cluster: Cluster, global_batch: int) -> Workload:
    """Costs and expected loads of the graph's sections, producers first."""
    found = tuple(crossings(graph))
    seen = patterns(graph)
    loads = {name: _load(graph, section, cluster, seen) for name, section in _ordered(graph, found)}
    reason = graph.attributes.get("unshardable")
    return Workload(graph, cluster, global_batch, loads, found, reason.data if isinstance(reason, StringAttr) else "")


def _load(graph: GraphOp, section: SectionOp, cluster: Cluster, seen: list[Pattern]) -> Load:
    mode = section.mode.data if section.mode is not None else "train"
    active = tuple(p for p in seen if is_active(section, p))
    whole = Load(section, mode, section_cost(graph, section), "0", {}, "", active)
    return on_rank(whole, 1, 1, cluster)


def on_rank(whole: Load, tp: int, pp: int, cluster: Cluster) -> Load:
    """A whole section's load as one rank of its replicas has it."""
    cost, device, mode = parallel.on_rank(whole.cost, tp, pp), cluster.device, whole.mode
    sums = parallel.sums_ns(cost, tp, cluster)
    forward = _plus(time.forward_ns(cost, device), sums)
    backward = {way: _plus(time.backward_ns(cost, mode, device, way), sums) for way in WORDS["recompute"]}
    return replace(whole, cost=cost, forward_ns=forward, backward_ns=backward, label=time.label(cost, device), tp=tp, pp=pp)


def _plus(time_ns: str, sums: str) -> str:
    return time_ns if "0" in (time_ns, sums) else f"{time_ns} + {sums}"


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


def problem(work: Workload, ranks: int, strategy: str, pins: Pins, free: bool = True) -> Problem:
    """The solver's problem for `ranks` devices. Raises UserError for pins that leave a section without a candidate.

    Unless `free`, only pinned sections have replicas of several ranks.
    """
    capacity, alike = work.cluster.device.usable, strategy == "uniform"
    sections: dict[str, tuple[Candidate, ...]] = {}
    for name, load in work.loads.items():
        sections[name] = layouts.unbeaten(_candidates(work, load, ranks, pins, free), capacity, alike)
    edges = tuple(_edge(work, c, sections) for c in work.crossings)
    return Problem(sections, edges, ranks, capacity, strategy, pins.together, work.cluster.per_node)


def usable_ranks(work: Workload, strategy: str, pins: Pins, ranks: int) -> int:
    """The most ranks of `ranks` that can all have work."""
    largest = {name: max(tp * pp for tp, pp in shapes(work, load, pins, ranks)) for name, load in work.loads.items()}
    counts = [work.samples(load) * largest[name] for name, load in work.loads.items()]
    return max(counts) if strategy in {"colocate", "uniform"} else sum(counts)


def _candidates(work: Workload, load: Load, ranks: int, pins: Pins, free: bool) -> Iterator[Candidate]:
    ways = ways_to_run(work, load, pins)
    for tp, pp in shapes(work, load, pins, ranks, free):
        replica = replica_of(work, load, tp, pp, ranks)
        most = min(ranks // (tp * pp), work.global_batch)
        for dp in pins.dp(load.name, most, layouts.replicas(tp * pp, ranks, work.cluster.per_node, most)):
            for size in pins.micro_batch(load.name, -(-work.samples(load) // dp)):
                yield from (candidate(work, replica, dp, size, *way) for way in ways)


def shapes(work: Workload, load: Load, pins: Pins, ranks: int, free: bool = True) -> list[tuple[int, int]]:
    """The (tp, pp) to consider: pinned ones, and where `free` those that the section is known to take."""
    tps = [1, *_tps(work.graph, load.section)] if free and not (load.cost.trainable and work.unshardable) else [1]
    stages = layouts.powers(max(1, _declared_layers(work.graph, load.section))) if free else [1]
    found = [(tp, pp) for tp in pins.choices(load.name, "tp", tps) for pp in pins.choices(load.name, "pp", stages)]
    fixed = pins.fixed(load.name, "tp") and pins.fixed(load.name, "pp")
    return found if fixed else [s for s in found if s[0] * s[1] <= ranks and s[0] <= work.cluster.per_node] or found[:1]


def _tps(graph: GraphOp, section: SectionOp) -> list[int]:
    """The tp above 1 that the section's blocks were found to take; blocks in which there is nothing to cut do not matter."""
    found = [graph.blocks[path].attributes.get("tp") for path in strings(section.blocks)]
    listed = [{int(i.value.data) for i in values if isinstance(i, IntegerAttr)} for values in found if isinstance(values, ArrayAttr)]
    return sorted(set.intersection(*listed)) if listed else []


def replica_of(work: Workload, load: Load, tp: int, pp: int, ranks: int) -> Load:
    """The section on one rank of its replicas. Raises UserError for a tp or pp that cannot be had."""
    if tp * pp > ranks:
        message = f"{load.name}.tp={tp} with pp={pp} is impossible: a replica would need {tp * pp} ranks, and there are {ranks}"
        raise UserError(message, remedy="set smaller ones, or give more ranks")
    if tp > 1 and load.cost.trainable and work.unshardable:
        message = f"{load.name}.tp={tp} is impossible: ranks would have parts of parameters, but {work.unshardable}"
        raise UserError(message, remedy=f"leave it out, or set {load.name}.tp=1")
    layers = max(load.cost.layers, _declared_layers(work.graph, load.section))
    if pp > max(1, layers):
        message = f"{load.name}.pp={pp} is impossible: the section has {layers} layers to cut between"
        raise UserError(message, remedy=f"set {load.name}.pp to at most {max(1, layers)}")
    return on_rank(load, tp, pp, work.cluster)


def _declared_layers(graph: GraphOp, section: SectionOp) -> int:
    """The layers of the stacks that the section's blocks belong to, also where they could not be measured."""
    blocks = [graph.blocks[path] for path in strings(section.blocks)]
    return sum({b.component: b.layers.data for b in blocks if b.layers is not None}.values())


def ways_to_run(work: Workload, load: Load, pins: Pins) -> list[tuple[str, str]]:
    """The ways to shard and to recompute a section. Raises UserError for a pin that asks for what the section does not have."""
    sharding, recompute = (pins.word(load.name, key) for key in ("sharding", "recompute"))
    if load.mode == "forward":
        _only_none(load, "recompute", pins, "it has no backward")
        recompute = ("none",)
    if pins.splits_backward(load.name):
        _only_none(load, "recompute", pins, "each part of a split backward would run it again")
        recompute = ("none",)
    reason = "it trains nothing" if not load.cost.trainable else work.unshardable
    if reason:
        _only_none(load, "sharding", pins, reason)
        sharding = ("none",)
    return [(s, r) for s in sharding for r in recompute]


def _only_none(load: Load, key: str, pins: Pins, reason: str) -> None:
    choice = pins.words.get(load.name, {}).get(key, "none")
    if choice != "none":
        raise UserError(f"{load.name}.{key}={choice} is impossible: {reason}", remedy=f"leave it out, or set {load.name}.{key}=none")


def candidate(work: Workload, load: Load, dp: int, size: int, sharding: str = "none", recompute: str = "none") -> Candidate:
    """The times and memory of a section in `dp` replicas with micro-batches of `size` samples."""
    busiest = Fraction(-(-work.samples(load) // dp))
    total, count, fill, drain = Fraction(0), Fraction(0), 0, 0
    for pattern in load.active:
        samples = busiest * pattern.share / load.share
        alike = min(size, ceil(samples))
        forward, backward = _times(work, load, pattern, alike, recompute)
        total += samples / alike * (forward + backward)
        count += samples / alike
        fill, drain = max(fill, forward), max(drain, backward)
    micro_batches = max(1, ceil(count))
    total += (load.pp - 1) * (fill + drain)  # until the last stage has work, and after the first one has none
    rank = room(work, load, dp, size, sharding, recompute, micro_batches)
    in_turn = min(micro_batches, max(load.pp, IN_TURN if any(c.src == load.name for c in work.crossings) else 1))
    return Candidate(
        dp=dp,
        micro_batch=size,
        time_ns=ceil(total) + _update_ns(work, load, dp, sharding),
        fill_ns=load.pp * fill,
        drain_ns=load.pp * drain,
        micro_batches=micro_batches,
        memory=rank.total(in_turn),
        memory_ahead=rank.total(in_turn if load.mode == "forward" else micro_batches),
        recompute=recompute,
        tp=load.tp,
        pp=load.pp,
        sharding=sharding,
    )


def _update_ns(work: Workload, load: Load, dp: int, sharding: str) -> int:
    """From the last backward to the end of the step: gradients summed, the optimizer's step."""
    cost, cluster = load.cost, work.cluster
    if load.mode != "train":
        return 0
    if sharding == "none":
        return time.reduce_ns(cost.summed_bytes, dp, cluster, load.tp * load.pp) + time.optimizer_ns(cost, cluster.device)
    travels = (cost.summed_bytes + cost.trainable_bytes) // 2  # the mean of gradients one way and weights the other
    return time.sharded_reduce_ns(travels, dp, cluster, load.tp * load.pp) + time.optimizer_ns(cost, cluster.device, dp)


def _times(work: Workload, load: Load, pattern: Pattern, samples: int, recompute: str) -> tuple[int, int]:
    key = (pattern.when, samples, recompute)
    if key not in load.memo:
        sizes = micro_batch(work.graph, pattern.sizes, samples)
        load.memo[key] = evaluate(load.forward_ns, sizes), evaluate(load.backward_ns[recompute], sizes)
    return load.memo[key]


def room(work: Workload, load: Load, dp: int, size: int, sharding: str, recompute: str, micro_batches: int) -> Memory:
    """Bytes on a rank; a micro-batch keeps what backward needs, and the tensors that come in and go out. The largest pattern counts."""
    return memory(load.cost, *_kept(work, load, size, recompute), dp, sharding, micro_batches)


def _kept(work: Workload, load: Load, size: int, recompute: str) -> tuple[int, int]:
    """Bytes that a micro-batch keeps, and what recomputation adds."""
    if (size, recompute) not in load.memo:
        activation = working = 0
        again, saved = load.cost.again.get(recompute), load.under(recompute).saved
        for pattern in load.active:
            sizes = micro_batch(work.graph, pattern.sizes, size)
            ends = sum(evaluate(c.size, sizes) for c in work.crossings if load.name in (c.src, c.dst))
            activation = max(activation, evaluate(saved, sizes) + ends)
            working = max(working, evaluate(again.working, sizes) if again else 0)
        load.memo[size, recompute] = activation, working
    return load.memo[size, recompute]


def _edge(work: Workload, crossing: Crossing, sections: dict[str, tuple[Candidate, ...]]) -> Edge:
    src, dst = work.loads[crossing.src], work.loads[crossing.dst]
    gradient = crossing.grad and src.mode != "forward" and dst.mode != "forward"
    directions = 2 if gradient else 1
    free = _independent(src, dst)
    sizes = {c.micro_batch for name in (crossing.src, crossing.dst) for c in sections[name]}
    largest = {n: _largest(work, crossing, src, n) for n in sizes}
    message = {n: time.message_ns(size, work.cluster) for n, size in largest.items()}
    batch = [micro_batch(work.graph, p.sizes, ceil(work.global_batch * p.share)) for p in src.active]
    total = sum(evaluate(crossing.size, sizes) for sizes in batch)
    latency = work.cluster.link(work.cluster.ranks).latency_ns
    return Edge(
        src=crossing.src,
        dst=crossing.dst,
        sent=tuple(_held(total, largest, c) for c in sections[crossing.src]),
        returned=tuple(gradient * _held(total, largest, c) for c in sections[crossing.dst]),
        latency=tuple(c.fill_ns + gradient * c.drain_ns + directions * message[c.micro_batch] for c in sections[crossing.src]),
        slack=tuple((c.micro_batches - 1) * c.drain_ns for c in sections[crossing.src]),
        free=tuple(int(free * c.time_ns) for c in sections[crossing.dst]),
        messages=tuple(directions * latency * c.micro_batches for c in sections[crossing.dst]),
        round=tuple(c.fill_ns + c.drain_ns for c in sections[crossing.dst]),
    )


def _held(total: int, largest: Mapping[int, int], c: Candidate) -> int:
    """Bytes of messages that a rank has sent and that are not received yet; the ranks of tp send a slice each."""
    return -(-min(-(-total // c.dp), SENDS * largest[c.micro_batch]) // c.tp)


def _independent(src: Load, dst: Load) -> Fraction:
    """The share of dst's samples that need nothing of src."""
    alone = sum((p.share for p in dst.active if p not in src.active), Fraction(0))
    return alone / dst.share if dst.share else Fraction(0)


def _largest(work: Workload, crossing: Crossing, src: Load, samples: int) -> int:
    """Bytes of the tensors of a micro-batch of `samples`, at the largest pattern."""
    return max((evaluate(crossing.size, micro_batch(work.graph, p.sizes, samples)) for p in src.active), default=0)
