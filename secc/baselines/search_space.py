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

from secc.alloc.problem.candidates import (
    SectionLoad,
    compute_rank_load,
    in_flight_alternating,
    memory_on_rank,
    price_candidate,
)
from secc.alloc.problem.types import Candidate
from secc.baselines.layout import BaselineContext, BaselineLayout, SectionLayout, count_layers
from secc.cost.model.memory import RankMemory
from secc.cost.model.patterns_and_transfers import input_patterns

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
RECOMPUTE_MODES = ("none", "selective", "full")  # to recompute, the fastest first
MOST_STAGES = 16
MAX_RANKED_LAYOUTS = 96  # layouts of a baseline that are looked at
VARIANTS_PER_ANCHOR = 8  # of them that differ in other sections than the anchor alone
WAIT_DIVISOR = 4  # a section waits for others for such a part of what these take

ChosenCandidates = Mapping[str, Candidate]
MeshShape = tuple[int, int, int]  # tp, pp, dp


class BaselineSpace:
    """The configurations of each section of a plan. Those made once are kept."""

    def __init__(self, base: BaselineContext) -> None:
        self.base, self.ranks = base, base.ranks
        self.capacity = base.work.cluster.device.usable_memory
        self.names = list(base.work.loads)
        self.awaited = {
            c.src for c in base.work.crossings if c.grad and base.work.loads[c.src].mode != "forward"
        }
        self.mean_tokens = sum(
            (p.share * self.base.mean_tokens(p) for p in input_patterns(base.work.graph)), Fraction(0)
        )  # tokens of a sample
        self.rank_load = cache(self._rank_load)
        self.recompute_variants = cache(self._recompute_variants)
        self.candidate_memory = cache(self._candidate_memory)
        self.separate_choices = cache(self._separate_choices)

    def tp_degrees(self) -> list[int]:
        """Possible degrees of tensor parallelism."""
        return _powers_of_two(min(self.base.work.cluster.per_node, self.ranks))

    def stage_counts(self, section: str) -> list[int]:
        """Possible numbers of stages."""
        return _powers_of_two(min(count_layers(self.base, section), MOST_STAGES, self.ranks))

    def micro_batch_sizes(self, section: str, dp: int) -> list[int]:
        """Possible micro-batches, in mean samples."""
        share = -(-self.base.work.active_sample_count(self.base.work.loads[section]) // dp)
        return [n for n in MICRO_BATCH_SIZES if n <= share] or [1]

    def _rank_load(self, section: str, tp: int, pp: int) -> SectionLoad:
        return compute_rank_load(self.base.work.loads[section], tp, pp, self.base.work.cluster)

    def _recompute_variants(self, section: str, mesh: MeshShape, size: int) -> list[Candidate]:
        """A configuration with each way to recompute, the fastest first."""
        tp, pp, dp = mesh
        load, work = self.rank_load(section, tp, pp), self.base.work
        sharding = (
            "none" if not load.cost.trainable or load.mode == "forward" or work.unshardable else "zero1"
        )
        return [
            price_candidate(work, load, dp, size, sharding, way)
            for way in (RECOMPUTE_MODES if load.mode != "forward" else RECOMPUTE_MODES[:1])
        ]

    # -- memory

    def _candidate_memory(self, section: str, c: Candidate) -> RankMemory:
        """Of a rank whose micro-batches hold as many of the largest samples as their tokens allow."""
        load, work = self.rank_load(section, c.tp, c.pp), self.base.work
        size = max(
            1,
            ceil(
                c.micro_batch * self.mean_tokens / max(self.base.mean_tokens(p) for p in load.active_patterns)
            ),
        )
        return memory_on_rank(work, load, c.dp, size, c.sharding, c.recompute, c.micro_batches)

    def section_layout(
        self, section: str, c: Candidate, ranks: range | tuple[int, ...], more: int | None = 0
    ) -> SectionLayout:
        """A section on these ranks; `more` is its `room`."""
        return SectionLayout(
            c, tuple(ranks), self.candidate_memory(section, c), self._alternating_in_flight(section, c), more
        )

    def _alternating_in_flight(self, section: str, c: Candidate) -> int:
        return in_flight_alternating(self.base.work, self.rank_load(section, c.tp, c.pp), c.micro_batches)

    def max_in_flight(self, section: str, c: Candidate) -> int:
        """How many micro-batches a rank that has nothing else can hold between forward and backward."""
        memory = self.candidate_memory(section, c)
        return max(1, (self.capacity - memory.total_bytes(0)) // max(1, memory.activation))

    def first_fitting(
        self,
        ways: Mapping[str, Sequence[Candidate]],
        made: Callable[[ChosenCandidates], BaselineLayout],
        time: Callable[[ChosenCandidates], int],
    ) -> Iterator[tuple[int, BaselineLayout]]:
        """The layout of the fastest way to recompute with which all ranks have memory, if there is one, and
        its time."""
        every = (dict(zip(ways, chosen, strict=True)) for chosen in product(*ways.values()))
        for chosen in sorted(every, key=time):
            layout = made(chosen)
            if layout.peak_bytes() <= self.capacity:
                yield time(chosen), layout
                return

    # -- sections apart

    def _separate_choices(self, powers: bool, anchor: str) -> list[ChosenCandidates]:
        """The best ways to give each section its own devices, with `powers` of two as numbers of replicas or
        with any.

        What counts is the slowest section, a part of the others and the pipeline's fill, and for sections
        that cannot hold all their micro-batches a round trip through the anchor for each time that they take
        their places.
        """
        tables = [self._fastest_by_ranks(name, powers, name == anchor) for name in self.names]
        awaited = (
            (n, c)
            for n, groups in zip(self.names, tables, strict=True)
            if n in self.awaited
            for c in chain(*groups)
        )
        held = {(n, c): -(-c.micro_batches // self.max_in_flight(n, c)) for n, c in awaited}
        best: defaultdict[int, list[tuple[int, int, ChosenCandidates]]] = defaultdict(
            list
        )  # by the anchor's configuration
        for number, some in enumerate(_iterate_products(tables, self.ranks)):
            alike = best[id(some[self.names.index(anchor)])]
            if len(alike) == VARIANTS_PER_ANCHOR and max(c.time_ns for c in some) > -alike[0][0]:
                continue
            chosen = dict(zip(self.names, some, strict=True))
            trip = chosen[anchor].fill_ns + chosen[anchor].drain_ns
            times = [max(c.time_ns, (held.get((n, c), 1) - 1) * trip) for n, c in chosen.items()]
            time = max(times) + (sum(times) - max(times)) // WAIT_DIVISOR + sum(c.fill_ns for c in some[:-1])
            heapq.heappush(alike, (-time, -number, chosen))
            if len(alike) > VARIANTS_PER_ANCHOR:
                heapq.heappop(alike)
        every = sorted(
            (entry for alike in best.values() for entry in alike), key=lambda entry: entry[:2], reverse=True
        )
        return [chosen for _, _, chosen in every[:MAX_RANKED_LAYOUTS]]

    def _fastest_by_ranks(self, section: str, powers: bool, anchor: bool) -> list[list[Candidate]]:
        """The fastest configuration for each number of devices, those that more devices do not make faster
        left out: for the anchor one list for each size of micro-batches, for sections that wait for others'
        backwards one for each way to recompute."""
        fastest: defaultdict[tuple[str, int], dict[int, Candidate]] = defaultdict(dict)
        most = self.ranks - len(self.names) + 1
        for tp, pp in (
            (t, p) for t, p in product(self.tp_degrees(), self.stage_counts(section)) if t * p <= most
        ):
            for dp in _powers_of_two(most // (tp * pp)) if powers else range(1, most // (tp * pp) + 1):
                for c in (
                    c
                    for n in self.micro_batch_sizes(section, dp)
                    for c in self._useful_variants(section, (tp, pp, dp), n)
                ):
                    found = fastest[
                        c.recompute if section in self.awaited else "", c.micro_batch if anchor else 0
                    ]
                    if c.ranks not in found or c.time_ns < found[c.ranks].time_ns:
                        found[c.ranks] = c
        return [_pareto_front([found[ranks] for ranks in sorted(found)]) for found in fastest.values()]

    def _useful_variants(self, section: str, mesh: MeshShape, size: int) -> Iterator[Candidate]:
        """The least recomputation that fits, and more while not all micro-batches that wait for others can be
        held."""
        for c in self.recompute_variants(section, mesh, size):
            if (
                self.candidate_memory(section, c).total_bytes(self._alternating_in_flight(section, c))
                <= self.capacity
            ):
                yield c
                if section not in self.awaited or self.max_in_flight(section, c) >= c.micro_batches:
                    return


def _pareto_front(found: Sequence[Candidate]) -> list[Candidate]:
    """Those that are faster than all before them."""
    kept: list[Candidate] = []
    for c in found:
        if not kept or c.time_ns < kept[-1].time_ns:
            kept.append(c)
    return kept


def _iterate_products(
    tables: Sequence[Sequence[Sequence[Candidate]]], ranks: int
) -> Iterator[tuple[Candidate, ...]]:
    """One configuration of each table, on at most `ranks` devices; of each list of the last one the two with
    the most devices left."""
    if len(tables) == 1:
        for found in tables[0]:
            fits = bisect_right(found, ranks, key=lambda c: c.ranks)
            yield from ((c,) for c in found[max(0, fits - 2) : fits])
        return
    for c in chain(*tables[0]):
        for rest in _iterate_products(tables[1:], ranks - c.ranks) if c.ranks < ranks else ():
            yield (c, *rest)


def _powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(max(1, most).bit_length())]
