"""What each section asks of a cluster, and the times and memory of one way to run it.

Stages, and replicas that gather parameters, wait for the longest of several micro-batches: there the spread
of samples counts.

Expected load: a global batch holds `global_batch x share` samples of each pattern, and the busiest of dp
replicas gets the dp-th part of the active ones, rounded up. A micro-batch holds samples of one pattern, as
the wavefront composes them, at the pattern's mean sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import ceil, lcm

from xdsl.dialects.builtin import StringAttr

from secc.alloc.problem.pins import WORDS, Pins
from secc.alloc.problem.size_spread import WHOLE, Spread, spread
from secc.alloc.problem.stackable_layers import places
from secc.alloc.problem.types import Candidate
from secc.cluster import Cluster
from secc.cost.model import roofline, tp_pp_scaling
from secc.cost.model.collectives import Span, in_a_row
from secc.cost.model.memory import Memory, memory
from secc.cost.model.patterns_and_transfers import (
    Crossing,
    Pattern,
    crossings,
    is_active,
    micro_batch,
    patterns,
)
from secc.cost.model.section_cost import SectionCost, section_cost
from secc.cost.model.zero3_cost import Passing, passing
from secc.errors import UserError
from secc.ir.analysis import sample_sizes as samples
from secc.ir.analysis.dataflow import number_of
from secc.ir.dialect.ops import GraphOp, SectionOp
from secc.runtime.plan.expr_eval import evaluate, evaluate_columns

MOVED = (
    "forward_permille",
    "backward_permille",
)  # of a section: its measured times over the modelled ones (`secc.driver.replan_from_run`)
# micro-batches in flight of a section whose consumers share its ranks: one waits for them while the next runs
IN_TURN = 2
AHEAD = 2  # times as many micro-batches in flight as a pipeline has stages, where memory allows
PARTS = (
    1,
    2,
)  # of a rank's memory, the parts that a section may fill with what it holds for consumers elsewhere

Dealt = tuple[int, int, list[tuple[Pattern, int, int]]]
Busy = tuple[int, int, int, int]


@dataclass(frozen=True)
class Load:
    """A section as the cost model sees it: its cost, times as texts, and the patterns it is active for.

    `backward_ns` has a text for each way to recompute. With `tp` and `pp`, cost and times are those of one
    rank of a replica; `spread` is that of its samples' times. `memo` keeps what the texts gave, `dealt` and
    `busy` what the busiest of so many replicas has to do, `gathers` what so many replicas gather under
    `zero3`.
    """

    section: SectionOp
    mode: str
    cost: SectionCost
    forward_ns: str
    backward_ns: Mapping[str, str]
    label: str
    active: tuple[Pattern, ...]
    spread: Spread = field(default_factory=Spread)
    tp: int = 1
    pp: int = 1
    memo: dict[object, tuple[int, int]] = field(
        init=False, repr=False, compare=False, default_factory=dict[object, tuple[int, int]]
    )
    dealt: dict[tuple[int, int], Dealt] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[int, int], Dealt]
    )
    busy: dict[tuple[int, int, str], Busy] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[int, int, str], Busy]
    )
    gathers: dict[int, Passing | None] = field(
        init=False, repr=False, compare=False, default_factory=dict[int, "Passing | None"]
    )

    @cached_property
    def name(self) -> str:
        return self.section.sym.data

    @cached_property
    def share(self) -> Fraction:
        """The share of samples for which the section is active."""
        return sum((p.share for p in self.active), Fraction(0))

    def under(self, recompute: str) -> SectionCost:
        """The cost with what is saved where some of it is recomputed."""
        again = self.cost.again.get(recompute)
        return self.cost if again is None else replace(self.cost, saved=again.saved)


@dataclass(frozen=True)
class Workload:
    """Everything that candidates are made from. `unshardable` says why the user's optimizer cannot be
    sharded, "" if it can.

    Where kinds of devices are mixed, the loads are priced with the worst figures, and `kinds` has the same on
    each kind alone.
    """

    graph: GraphOp
    cluster: Cluster
    global_batch: int
    loads: dict[str, Load]
    crossings: tuple[Crossing, ...]
    unshardable: str = ""
    kinds: tuple[Workload, ...] = ()
    active: dict[str, int] = field(init=False, repr=False, compare=False, default_factory=dict[str, int])
    layered: dict[str, int] = field(init=False, repr=False, compare=False, default_factory=dict[str, int])
    split: dict[tuple[str, int, int], Load] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[str, int, int], Load]
    )
    sized: dict[tuple[frozenset[str], int], dict[str, int]] = field(
        init=False,
        repr=False,
        compare=False,
        default_factory=dict[tuple[frozenset[str], int], dict[str, int]],
    )

    @cached_property
    def sources(self) -> frozenset[str]:
        """The sections that feed others."""
        return frozenset(c.src for c in self.crossings)

    @cached_property
    def listed(self) -> dict[frozenset[str], dict[str, list[int]]]:
        """Sizes of the samples that memory must have room for, a column for each symbol, by pattern; where
        micro-batches are padded to the global batch's widths, with the largest of these."""
        found: dict[frozenset[str], dict[str, list[int]]] = {}
        for pattern, sizes in samples.all_known(self.graph):
            columns = found.setdefault(pattern, {name: [] for name in sizes})
            for name, size in sizes.items():
                columns[name].append(size)
        if self.graph.widths is not None and self.graph.widths.data == "global":
            for name in (name for name, op in self.graph.symbols.items() if op.kind.data == "width"):
                most = max((max(columns[name]) for columns in found.values()), default=0)
                found = {
                    when: columns | {name: [most] * len(columns[name])} for when, columns in found.items()
                }
        return found

    def sizes(self, pattern: Pattern, samples: int) -> dict[str, int]:
        """Of a micro-batch of so many samples of a pattern."""
        key = pattern.when, samples
        if key not in self.sized:
            self.sized[key] = micro_batch(self.graph, pattern.sizes, samples)
        return self.sized[key]

    def on(self, kind: int) -> Workload:
        """The workload as a candidate of this kind sees it."""
        return self.kinds[kind] if self.kinds and kind >= 0 else self

    def alone(self, cluster: Cluster) -> Workload:
        """The same on another cluster."""
        return replace(
            self,
            cluster=cluster,
            kinds=(),
            loads={name: on_rank(load, 1, 1, cluster) for name, load in self.loads.items()},
        )

    def on_rank(self, load: Load, tp: int, pp: int) -> Load:
        """A section's load as one rank of its replicas has it, which remembers what it was asked."""
        key = load.name, tp, pp
        if key not in self.split:
            self.split[key] = on_rank(load, tp, pp, self.cluster)
        return self.split[key]

    def places(self, load: Load) -> int:
        """How many layers stages of a section can share."""
        if load.name not in self.layered:
            self.layered[load.name] = places(self.graph, load.section, load.cost.layers)
        return self.layered[load.name]

    def samples(self, load: Load) -> int:
        """Active samples of a section in a global batch, as expected and rounded up; at least 1."""
        if load.name not in self.active:
            self.active[load.name] = max(1, ceil(self.global_batch * load.share))
        return self.active[load.name]


def workload(graph: GraphOp, cluster: Cluster, global_batch: int) -> Workload:
    """Costs and expected loads of the graph's sections, producers first."""
    found = tuple(crossings(graph))
    seen = patterns(graph)
    loads = {name: _load(graph, section, cluster, seen) for name, section in _ordered(graph, found)}
    reason = graph.attributes.get("unshardable")
    work = Workload(
        graph, cluster, global_batch, loads, found, reason.data if isinstance(reason, StringAttr) else ""
    )
    return replace(work, kinds=tuple(map(work.alone, cluster.parts))) if cluster.groups else work


def _load(graph: GraphOp, section: SectionOp, cluster: Cluster, seen: list[Pattern]) -> Load:
    mode = section.mode.data if section.mode is not None else "train"
    active = tuple(p for p in seen if is_active(section, p))
    whole = Load(section, mode, section_cost(graph, section), "0", {}, "", active)
    load = on_rank(whole, 1, 1, cluster)
    return replace(load, spread=spread(graph, active, f"{load.forward_ns} + {load.backward_ns['none']}"))


def on_rank(whole: Load, tp: int, pp: int, cluster: Cluster) -> Load:
    """A whole section's load as one rank of its replicas has it."""
    cost, device, mode = tp_pp_scaling.on_rank(whole.cost, tp, pp), cluster.device, whole.mode
    sums = tp_pp_scaling.sums_ns(cost, tp, cluster)
    moved = [int(number_of(whole.section, name) or 1000) for name in MOVED]
    forward = _times_permille(_plus(roofline.forward_ns(cost, device), sums), moved[0])
    backward = {
        way: _times_permille(_plus(roofline.backward_ns(cost, mode, device, way), sums), moved[1])
        for way in WORDS["recompute"]
    }
    return replace(
        whole,
        cost=cost,
        forward_ns=forward,
        backward_ns=backward,
        label=roofline.label(cost, device),
        tp=tp,
        pp=pp,
    )


def _times_permille(time_ns: str, permille: int) -> str:
    return time_ns if permille == 1000 or time_ns == "0" else f"({time_ns})*{permille}//1000"


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


def replica_of(work: Workload, load: Load, tp: int, pp: int, ranks: int) -> Load:
    """The section on one rank of its replicas. Raises UserError for a tp or pp that cannot be had."""
    if tp * pp > ranks:
        message = f"{load.name}.tp={tp} with pp={pp} is impossible: a replica would need {tp * pp} ranks, and there are {ranks}"
        raise UserError(message, remedy="set smaller ones, or give more ranks")
    if tp > 1 and load.cost.trainable and work.unshardable:
        message = (
            f"{load.name}.tp={tp} is impossible: ranks would have parts of parameters, but {work.unshardable}"
        )
        raise UserError(message, remedy=f"leave it out, or set {load.name}.tp=1")
    layers = work.places(load)
    if pp > max(1, layers):
        message = f"{load.name}.pp={pp} is impossible: the section has {layers} layers to cut between"
        raise UserError(message, remedy=f"set {load.name}.pp to at most {max(1, layers)}")
    return work.on_rank(load, tp, pp)


def ways_to_run(work: Workload, load: Load, pins: Pins) -> list[tuple[str, str]]:
    """The ways to shard and to recompute a section. Raises UserError for a pin that asks for what the section
    does not have."""
    sharding, recompute = (pins.word(load.name, key) for key in ("sharding", "recompute"))
    if load.mode == "forward":
        _only_none(load, "recompute", pins, "it has no backward")
        recompute = ("none",)
    if pins.splits_backward(load.name):
        _only_none(load, "recompute", pins, "each part of a split backward would run it again")
        recompute = ("none",)
        if sharding == ("zero3",):
            _only_none(load, "sharding", pins, "each part of a split backward would gather parameters again")
        sharding = tuple(s for s in sharding if s != "zero3")
    if not load.cost.trainable:
        if sharding not in (("zero3",), WORDS["sharding"]):
            _only_none(load, "sharding", pins, "it trains nothing")
        sharding = tuple(s for s in sharding if s in ("none", "zero3"))
    elif work.unshardable:
        _only_none(load, "sharding", pins, work.unshardable)
        sharding = ("none",)
    return [(s, r) for s in sharding for r in recompute]


def _only_none(load: Load, key: str, pins: Pins, reason: str) -> None:
    choice = pins.words.get(load.name, {}).get(key, "none")
    if choice != "none":
        raise UserError(
            f"{load.name}.{key}={choice} is impossible: {reason}",
            remedy=f"leave it out, or set {load.name}.{key}=none",
        )


def candidate(
    work: Workload, load: Load, dp: int, size: int, sharding: str = "none", recompute: str = "none"
) -> Candidate:
    """The times and memory of a section in `dp` replicas with micro-batches of `size` samples."""
    busy = busy_ns(work, load, dp, size, sharding, recompute)
    return _candidate(
        work,
        load,
        dp,
        size,
        sharding,
        recompute,
        busy,
        room(work, load, dp, size, sharding, recompute, busy[1]),
    )


def stays(load: Load, dp: int, sharding: str, capacity: int) -> bool:
    """Whether what stays on a rank fits into `capacity` bytes, whatever micro-batches there are."""
    return any(
        memory(load.cost, 0, dp=dp, sharding=sharding, micro_batches=n).total(1) <= capacity for n in (1, 2)
    )


def fitting(
    work: Workload, load: Load, dp: int, size: int, sharding: str, recompute: str, capacity: int | None
) -> list[Candidate]:
    """The candidate, and what it holds for consumers elsewhere varied (`held`); none if it needs more than
    `capacity` bytes."""
    _, count, _ = _dealt(load, -(-work.samples(load) // dp), size)
    rank = room(work, load, dp, size, sharding, recompute, count)
    if capacity is not None and rank.total(in_turn(work, load, count)) > capacity:
        return []
    busy = busy_ns(work, load, dp, size, sharding, recompute)
    return _held(work, load, _candidate(work, load, dp, size, sharding, recompute, busy, rank), rank)


def _candidate(
    work: Workload, load: Load, dp: int, size: int, sharding: str, recompute: str, busy: Busy, rank: Memory
) -> Candidate:
    total, micro_batches, fill, drain = busy
    turn = in_turn(work, load, micro_batches)
    own = rank.total(turn)
    return Candidate(
        dp=dp,
        micro_batch=size,
        time_ns=total + bubbles_ns(load, size, busy) + update_ns(work, load, dp, sharding),
        fill_ns=load.pp * fill,
        drain_ns=load.pp * drain,
        micro_batches=micro_batches,
        memory=own,
        memory_ahead=own if load.mode == "forward" or turn == micro_batches else rank.total(micro_batches),
        in_flight=0 if load.mode == "forward" else micro_batches,
        recompute=recompute,
        tp=load.tp,
        pp=load.pp,
        sharding=sharding,
    )


def in_turn(work: Workload, load: Load, micro_batches: int) -> int:
    """Micro-batches in flight where backward follows forward."""
    return min(micro_batches, max(load.pp, IN_TURN if load.name in work.sources else 1))


def bubbles_ns(load: Load, size: int, busy: Busy) -> int:
    """What stages wait: until the last one has work, after the first one has none, and where long
    micro-batches follow short ones.

    For each stage but one, half of a micro-batch of mean samples and half of the longest one, which is what
    trials find.
    """
    total, micro_batches, fill, drain = busy
    if (
        load.mode == "forward"
    ):  # nothing comes back that stages would wait for, and they may fill and drain beside other steps
        return (load.pp - 1) * fill // 2
    return (
        (load.pp - 1)
        * (fill + drain + max(fill + drain, load.spread.longest(size) * total // (WHOLE * micro_batches)))
        // 2
    )


def held(work: Workload, load: Load, c: Candidate) -> list[Candidate]:
    """The candidate with all its micro-batches in flight, and with as many as fit into all and half of a
    rank's memory.

    Each place in flight is then taken in rounds, for which consumers elsewhere have to return gradients.
    """
    return _held(work, load, c, room_of(work, load, c))


def _held(work: Workload, load: Load, c: Candidate, rank: Memory) -> list[Candidate]:
    if not c.in_flight or load.name not in work.sources:
        return [c]
    least, capacity = min(c.micro_batches, max(load.pp, IN_TURN)), work.cluster.device.usable
    found = {c.micro_batches: c}
    for part in PARTS:
        rounds, count, size = 1, c.micro_batches, c.memory_ahead
        while size > capacity // part and count > least:
            rounds *= 2
            count = max(least, -(-c.micro_batches // rounds))
            size = rank.total(count)
        if count < c.micro_batches:
            found[count] = replace(c, in_flight=count, memory_ahead=size, rounds=-(-c.micro_batches // count))
    return list(found.values())


def update_ns(work: Workload, load: Load, dp: int, sharding: str) -> int:
    """From the last backward to the end of the step: gradients summed, the optimizer's step."""
    key = "update", dp, sharding
    if key not in load.memo:
        load.memo[key] = _update_ns(work, load, dp, sharding), 0
    return load.memo[key][0]


def _update_ns(work: Workload, load: Load, dp: int, sharding: str) -> int:
    cost, cluster = load.cost, work.cluster
    if load.mode != "train":
        return 0
    if sharding == "zero3" and dp > 1:
        return roofline.optimizer_ns(cost, cluster.device, dp)  # every backward has summed its gradients
    if sharding == "none":
        return roofline.reduce_ns(cost.wide_bytes, dp, cluster, load.tp * load.pp) + roofline.optimizer_ns(
            cost, cluster.device
        )
    travels = (
        cost.wide_bytes + cost.trainable_bytes
    ) // 2  # the mean of gradients one way and weights the other
    return roofline.sharded_reduce_ns(travels, dp, cluster, load.tp * load.pp) + roofline.optimizer_ns(
        cost, cluster.device, dp
    )


def times_of(
    work: Workload, load: Load, dp: int, sharding: str, recompute: str, span: Span | None = None
) -> tuple[str, str]:
    """Nanoseconds of a micro-batch's forward and backward on a rank, over its symbols.

    `span` is where the ranks are that share a place in their replicas, if that is known.
    """
    own, span = (load.forward_ns, load.backward_ns[recompute]), span or _span(work, load, dp)
    gathers = passing(load.cost, sharding, work.cluster, span)
    return own if gathers is None else gathers.texts(*own)


def _span(work: Workload, load: Load, dp: int) -> Span:
    """Of the ranks that share a place in their replicas, which stand in a row."""
    return in_a_row(dp, work.cluster, load.tp * load.pp)


def busy_ns(work: Workload, load: Load, dp: int, size: int, sharding: str, recompute: str) -> Busy:
    """Of the busiest of `dp` replicas: ns of its micro-batches, their number, ns of the longest forward and
    of the longest backward."""
    gathers = _gathers(work, load, dp) if sharding == "zero3" else None
    busiest = -(-work.samples(load) // dp)
    key = busiest, size, recompute
    if gathers is None and key in load.busy:
        return load.busy[key]
    parts, count, dealt = _dealt(load, busiest, size)
    waits = _in_rounds(load, count, dp, size) if gathers is not None else load.spread.uneven(busiest, count)
    total, fill, drain = 0, 0, 0
    for pattern, alike, number in dealt:
        forward, backward = _times(work, load, pattern, alike, recompute)
        if gathers is not None:
            forward, backward = (
                gathers.forward_ns(forward * waits // WHOLE),
                gathers.backward_ns(backward * waits // WHOLE),
            )
        total += number * (forward + backward)
        fill, drain = max(fill, forward), max(drain, backward)
    found = -(-total * (WHOLE if gathers else waits) // (parts * WHOLE)), count, fill, drain
    if gathers is None:
        load.busy[key] = found
    return found


def _in_rounds(load: Load, rounds: int, dp: int, size: int) -> int:
    key = "rounds", rounds, dp, size
    if key not in load.memo:
        load.memo[key] = load.spread.in_rounds(rounds, dp, size), 0
    return load.memo[key][0]


def _gathers(work: Workload, load: Load, dp: int) -> Passing | None:
    """The collectives of passes under `zero3`."""
    if dp not in load.gathers:
        load.gathers[dp] = passing(load.cost, "zero3", work.cluster, _span(work, load, dp))
    return load.gathers[dp]


def _dealt(load: Load, busiest: int, size: int) -> Dealt:
    """How a replica's samples are expected to be cut: for each pattern the samples in a micro-batch, and how
    many of these there are, in parts of which the first number makes a whole one; the second is how many
    there are in all."""
    if (busiest, size) not in load.dealt:
        samples = [(pattern, busiest * pattern.share / load.share) for pattern in load.active]
        numbers = [(pattern, min(size, ceil(n)), n / min(size, ceil(n))) for pattern, n in samples]
        parts = lcm(*(n.denominator for *_, n in numbers))
        dealt = [(p, alike, int(n * parts)) for p, alike, n in numbers]
        load.dealt[busiest, size] = parts, max(1, -(-sum(number for *_, number in dealt) // parts)), dealt
    return load.dealt[busiest, size]


def _times(work: Workload, load: Load, pattern: Pattern, samples: int, recompute: str) -> tuple[int, int]:
    key = (pattern.when, samples, recompute)
    if key not in load.memo:
        sizes = work.sizes(pattern, samples)
        both = evaluate(load.forward_ns, sizes), evaluate(load.backward_ns[recompute], sizes)
        load.memo[key] = load.spread.mean(pattern.when, both[0]), load.spread.mean(pattern.when, both[1])
    return load.memo[key]


def room(
    work: Workload, load: Load, dp: int, size: int, sharding: str, recompute: str, micro_batches: int
) -> Memory:
    """Bytes on a rank; a micro-batch keeps what backward needs, and the tensors that come in and go out. The
    largest pattern counts."""
    return memory(
        load.cost,
        *_kept(work, load, size, recompute),
        dp,
        sharding,
        micro_batches,
        _largest(work, load, recompute),
    )


def room_of(work: Workload, load: Load, c: Candidate) -> Memory:
    """The same of a candidate; `load` is that of a rank."""
    return room(work, load, c.dp, c.micro_batch, c.sharding, c.recompute, c.micro_batches)


def stage_room(work: Workload, load: Load, c: Candidate, stage: int) -> int:
    """How many micro-batches a stage may hold: as many as help and memory allows, at least one for itself and
    each stage behind it.

    `load` is that of a rank of the stage.
    """
    least, most = c.pp - stage, AHEAD * c.pp
    rank = room_of(work, load, c)
    return next((n for n in range(most, least, -1) if rank.total(n) <= work.cluster.device.usable), least)


def _kept(work: Workload, load: Load, size: int, recompute: str) -> tuple[int, int]:
    """Bytes that a micro-batch keeps, and what a forward without backward, gradients in glue or recomputation
    add for a time."""
    if (size, recompute) not in load.memo:
        activation = working = 0
        again, saved = load.cost.again.get(recompute), load.under(recompute).saved
        for pattern in load.active:
            sizes = work.sizes(pattern, size)
            activation = max(activation, sum(evaluate(text, sizes) for text in (saved, *_ends(work, load))))
            passing = (
                (load.cost.passing, load.cost.logits_passing, again.working if again else "0")
                if load.mode != "forward"
                else ()
            )
            working = max(working, *(evaluate(text, sizes) for text in (load.cost.transient, *passing)))
        if load.mode == "forward":
            working = max(working, *(max(held) for _, held in _alone(work, load, (load.cost.transient,))), 0)
        load.memo[size, recompute] = activation, working
    return load.memo[size, recompute]


def _largest(work: Workload, load: Load, recompute: str) -> int:
    """Bytes that the largest of the listed samples keeps as a micro-batch of its own."""
    key = "largest", recompute
    if key not in load.memo:
        load.memo[key] = max((max(kept) for _, kept in kept_alone(work, load, recompute)), default=0), 0
    return load.memo[key][0]


def kept_alone(
    work: Workload, load: Load, recompute: str
) -> Iterator[tuple[Mapping[str, Sequence[int]], list[int]]]:
    """What each listed sample keeps as a micro-batch of its own, for each pattern with the samples' sizes.
    `load` is that of a rank."""
    return _alone(work, load, (load.under(recompute).saved, *_ends(work, load)))


def _alone(
    work: Workload, load: Load, texts: Sequence[str]
) -> Iterator[tuple[Mapping[str, Sequence[int]], list[int]]]:
    """The sum of the texts for each listed sample as a micro-batch of its own."""
    for pattern in load.active:
        if columns := work.listed.get(pattern.when):
            count = len(next(iter(columns.values())))
            every = {name: [size] * count for name, size in work.sizes(pattern, 1).items()} | columns
            yield (
                columns,
                list(map(sum, zip(*(evaluate_columns(text, every, count) for text in texts), strict=True))),
            )


def _ends(work: Workload, load: Load) -> list[str]:
    """Bytes of the tensors that come in and go out, as texts."""
    return [c.size for c in work.crossings if load.name in (c.src, c.dst)]
