"""The configurations that baselines search: a section's replicas, tensor parallelism, stages and
micro-batches, ranked in closed form.

Tensor parallelism is a power of two inside a node, stages a power of two up to the layers, micro-batches have
1 to 16 mean samples. Optimizer states are sharded wherever there is something to shard, as Megatron's
distributed optimizer does, and layers are recomputed only as far as memory asks; memory is counted as plans
count it (`secc.cost.model.memory`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from itertools import chain, product
from math import ceil

from secc.alloc.problem.candidates import Load, candidate, in_turn, on_rank, room
from secc.alloc.problem.types import Candidate
from secc.baselines.layout import Base, Layout, Part, layers
from secc.cost.model.memory import Memory
from secc.cost.model.patterns_and_transfers import patterns

SIZES = (1, 2, 4, 8, 16)
WAYS = ("none", "selective", "full")  # to recompute, the fastest first
MOST_STAGES = 16
RANKED = 96  # layouts of a baseline that are looked at
ALIKE = 8  # of them that differ in other sections than the anchor alone
BUSY = 4  # a section waits for others for such a part of what these take

Chosen = Mapping[str, Candidate]
Mesh = tuple[int, int, int]  # tp, pp, dp


class Space:
    """The configurations of each section of a plan. Those made once are kept."""

    def __init__(self, base: Base) -> None:
        self.base, self.ranks = base, base.ranks
        self.capacity = base.work.cluster.device.usable
        self.names = list(base.work.loads)
        self.awaited = {
            c.src for c in base.work.crossings if c.grad and base.work.loads[c.src].mode != "forward"
        }
        self.mean = sum(
            (p.share * self.base.tokens(p) for p in patterns(base.work.graph)), Fraction(0)
        )  # tokens of a sample
        self.rank = cache(self._rank)
        self.ways = cache(self._ways)
        self.memory = cache(self._memory)
        self.apart = cache(self._apart)

    def widths(self) -> list[int]:
        """Possible degrees of tensor parallelism."""
        return _powers(min(self.base.work.cluster.per_node, self.ranks))

    def depths(self, section: str) -> list[int]:
        """Possible numbers of stages."""
        return _powers(min(layers(self.base, section), MOST_STAGES, self.ranks))

    def sizes(self, section: str, dp: int) -> list[int]:
        """Possible micro-batches, in mean samples."""
        share = -(-self.base.work.samples(self.base.work.loads[section]) // dp)
        return [n for n in SIZES if n <= share] or [1]

    def _rank(self, section: str, tp: int, pp: int) -> Load:
        return on_rank(self.base.work.loads[section], tp, pp, self.base.work.cluster)

    def _ways(self, section: str, mesh: Mesh, size: int) -> list[Candidate]:
        """A configuration with each way to recompute, the fastest first."""
        tp, pp, dp = mesh
        load, work = self.rank(section, tp, pp), self.base.work
        sharding = (
            "none" if not load.cost.trainable or load.mode == "forward" or work.unshardable else "zero1"
        )
        return [
            candidate(work, load, dp, size, sharding, way)
            for way in (WAYS if load.mode != "forward" else WAYS[:1])
        ]

    # -- memory
    # -------------------------------------------------------------------------------------------------------------------

    def _memory(self, section: str, c: Candidate) -> Memory:
        """Of a rank whose micro-batches hold as many of the largest samples as their tokens allow."""
        load, work = self.rank(section, c.tp, c.pp), self.base.work
        size = max(1, ceil(c.micro_batch * self.mean / max(self.base.tokens(p) for p in load.active)))
        return room(work, load, c.dp, size, c.sharding, c.recompute, c.micro_batches)

    def part(self, section: str, c: Candidate, ranks: range | tuple[int, ...], more: int | None = 0) -> Part:
        """A section on these ranks; `more` is its `room`."""
        return Part(c, tuple(ranks), self.memory(section, c), self._turns(section, c), more)

    def _turns(self, section: str, c: Candidate) -> int:
        return in_turn(self.base.work, self.rank(section, c.tp, c.pp), c.micro_batches)

    def in_flight(self, section: str, c: Candidate) -> int:
        """How many micro-batches a rank that has nothing else can hold between forward and backward."""
        memory = self.memory(section, c)
        return max(1, (self.capacity - memory.total(0)) // max(1, memory.activation))

    def fitting(
        self,
        ways: Mapping[str, Sequence[Candidate]],
        made: Callable[[Chosen], Layout],
        time: Callable[[Chosen], int],
    ) -> Iterator[tuple[int, Layout]]:
        """The layout of the fastest way to recompute with which all ranks have memory, if there is one, and
        its time."""
        every = (dict(zip(ways, chosen, strict=True)) for chosen in product(*ways.values()))
        for chosen in sorted(every, key=time):
            layout = made(chosen)
            if layout.fullest() <= self.capacity:
                yield time(chosen), layout
                return

    # -- sections apart
    # -----------------------------------------------------------------------------------------------------------

    def _apart(self, powers: bool, anchor: str) -> list[Chosen]:
        """The best ways to give each section its own devices, with `powers` of two as numbers of replicas or
        with any.

        What counts is the slowest section, a part of the others and the pipeline's fill, and for sections
        that cannot hold all their micro-batches a round trip through the anchor for each time that they take
        their places.
        """
        tables = [self._table(name, powers, name == anchor) for name in self.names]
        awaited = (
            (n, c)
            for n, groups in zip(self.names, tables, strict=True)
            if n in self.awaited
            for c in chain(*groups)
        )
        held = {(n, c): -(-c.micro_batches // self.in_flight(n, c)) for n, c in awaited}
        best: defaultdict[int, list[tuple[int, int, Chosen]]] = defaultdict(
            list
        )  # by the anchor's configuration
        for number, some in enumerate(_products(tables, self.ranks)):
            alike = best[id(some[self.names.index(anchor)])]
            if len(alike) == ALIKE and max(c.time_ns for c in some) > -alike[0][0]:
                continue
            chosen = dict(zip(self.names, some, strict=True))
            trip = chosen[anchor].fill_ns + chosen[anchor].drain_ns
            times = [max(c.time_ns, (held.get((n, c), 1) - 1) * trip) for n, c in chosen.items()]
            time = max(times) + (sum(times) - max(times)) // BUSY + sum(c.fill_ns for c in some[:-1])
            heapq.heappush(alike, (-time, -number, chosen))
            if len(alike) > ALIKE:
                heapq.heappop(alike)
        every = sorted(
            (entry for alike in best.values() for entry in alike), key=lambda entry: entry[:2], reverse=True
        )
        return [chosen for _, _, chosen in every[:RANKED]]

    def _table(self, section: str, powers: bool, anchor: bool) -> list[list[Candidate]]:
        """The fastest configuration for each number of devices, those that more devices do not make faster
        left out: for the anchor one list for each size of micro-batches, for sections that wait for others'
        backwards one for each way to recompute."""
        fastest: defaultdict[tuple[str, int], dict[int, Candidate]] = defaultdict(dict)
        most = self.ranks - len(self.names) + 1
        for tp, pp in ((t, p) for t, p in product(self.widths(), self.depths(section)) if t * p <= most):
            for dp in _powers(most // (tp * pp)) if powers else range(1, most // (tp * pp) + 1):
                for c in (c for n in self.sizes(section, dp) for c in self._useful(section, (tp, pp, dp), n)):
                    found = fastest[
                        c.recompute if section in self.awaited else "", c.micro_batch if anchor else 0
                    ]
                    if c.ranks not in found or c.time_ns < found[c.ranks].time_ns:
                        found[c.ranks] = c
        return [_pareto([found[ranks] for ranks in sorted(found)]) for found in fastest.values()]

    def _useful(self, section: str, mesh: Mesh, size: int) -> Iterator[Candidate]:
        """The least recomputation that fits, and more while not all micro-batches that wait for others can be
        held."""
        for c in self.ways(section, mesh, size):
            if self.memory(section, c).total(self._turns(section, c)) <= self.capacity:
                yield c
                if section not in self.awaited or self.in_flight(section, c) >= c.micro_batches:
                    return


def _pareto(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that are faster than all before them."""
    kept: list[Candidate] = []
    for c in found:
        if not kept or c.time_ns < kept[-1].time_ns:
            kept.append(c)
    return kept


def _products(tables: Sequence[Sequence[Sequence[Candidate]]], ranks: int) -> Iterator[tuple[Candidate, ...]]:
    """One configuration of each table, on at most `ranks` devices; of each list of the last one the two with
    the most devices left."""
    if len(tables) == 1:
        for found in tables[0]:
            fits = bisect_right(found, ranks, key=lambda c: c.ranks)
            yield from ((c,) for c in found[max(0, fits - 2) : fits])
        return
    for c in chain(*tables[0]):
        for rest in _products(tables[1:], ranks - c.ranks) if c.ranks < ranks else ():
            yield (c, *rest)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(max(1, most).bit_length())]
