"""The configurations that baselines search: replicas, tensor and context parallelism, stages, parts of
experts and micro-batches of a section, in closed form.

Tensor parallelism is a power of two inside a node, stages are a power of two up to the layers, experts form a
power of two of parts over a replica or several of them, micro-batches have 1 to 16 mean samples. Context
parallelism is a power of two where samples are long, by the same rule as in plans, and one for all samples.
Experts in parts and context parallelism do not meet, as in plans. Optimizer
states are sharded wherever there is something to shard, as Megatron's distributed optimizer does; layers are
recomputed only as far as memory demands. Memory is counted as in plans (`secc.cost.model.memory`).
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
from typing import NamedTuple

from secc.alloc.problem.build_problem import MAX_EXPERT_PARTS
from secc.alloc.problem.candidate_memory import memory_on_rank
from secc.alloc.problem.candidate_pruning import powers_of_two, stage_counts
from secc.alloc.problem.candidates import price_candidate
from secc.alloc.problem.in_flight import in_flight_alternating
from secc.alloc.problem.row_parts import row_parts_for_long_samples
from secc.alloc.problem.section_load import SectionLoad, compute_rank_load
from secc.alloc.problem.types import Candidate, ReplicaShape
from secc.baselines.layout import BaselineContext, BaselineLayout, SectionLayout, count_layers
from secc.cost.model.memory import RankMemory
from secc.cost.model.patterns_and_transfers import input_patterns

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
RECOMPUTE_MODES = ("none", "selective", "full")  # the fastest first
MAX_STAGES = 16
MAX_RANKED_LAYOUTS = 96  # layouts of a baseline that are considered
VARIANTS_PER_ANCHOR = 8  # layouts with the same anchor that are kept
WAIT_DIVISOR = 4  # the slowest section waits for a quarter of the other sections' time

ChosenCandidates = Mapping[str, Candidate]


class MeshShape(NamedTuple):
    """Ranks of a section: `dp` replicas of `tp * pp * cp` ranks, with experts in `ep` parts."""

    tp: int
    pp: int
    dp: int
    ep: int = 1
    cp: int = 1

    @property
    def replica(self) -> ReplicaShape:
        """The shape of a replica."""
        return ReplicaShape(self.tp, self.pp, self.cp, self.ep)


class BaselineSpace:
    """Configurations of each section of a plan; results are memoised."""

    def __init__(self, base: BaselineContext) -> None:
        self.base, self.ranks = base, base.ranks
        self.capacity = base.work.cluster.device.usable_memory
        self.names = list(base.work.loads)
        self.awaited = {
            c.src for c in base.work.crossings if c.grad and base.work.loads[c.src].mode != "forward"
        }
        self.mean_tokens = sum(
            (p.share * self.base.mean_tokens(p) for p in input_patterns(base.work.graph)), Fraction(0)
        )
        self.row_parts = cache(self._row_parts)
        self.rank_load = cache(self._rank_load)
        self.recompute_variants = cache(self._recompute_variants)
        self.candidate_memory = cache(self._candidate_memory)
        self.separate_choices = cache(self._separate_choices)

    def tp_degrees(self) -> list[int]:
        """Possible degrees of tensor parallelism."""
        return powers_of_two(min(self.base.work.cluster.per_node, self.ranks))

    def stage_counts(self, section: str) -> list[int]:
        """Possible numbers of stages."""
        most = min(MAX_STAGES, self.ranks)
        return [n for n in stage_counts(count_layers(self.base, section)) if n <= most]

    def micro_batch_sizes(self, section: str, dp: int) -> list[int]:
        """Possible micro-batches, in mean samples."""
        share = -(-self.base.work.active_sample_count(self.base.work.loads[section]) // dp)
        return [n for n in MICRO_BATCH_SIZES if n <= share] or [1]

    def _row_parts(self, section: str, tp: int, pp: int) -> list[int]:
        """Possible numbers of ranks that share the rows of a section's sequences."""
        return row_parts_for_long_samples(self.base.work, self.base.work.loads[section], tp, pp, self.ranks)

    def expert_parts(self, section: str, tp: int, dp: int, cp: int = 1) -> list[int]:
        """Possible numbers of parts of a section's experts: 1, and powers of two that divide them, from all
        ranks of a replica to groups of replicas that divide `dp`."""
        if cp > 1:
            return [1]
        cost = self.base.work.loads[section].cost
        experts = cost.experts if cost.routed_work != "0" else 0
        return [1] + [
            n
            for n in powers_of_two(min(experts, MAX_EXPERT_PARTS, tp * dp))
            if n >= max(2, tp) and experts % n == 0 and dp % (n // tp) == 0
        ]

    def mesh_variants(self, section: str, mesh: MeshShape, size: int) -> list[Candidate]:
        """A configuration with each number of parts of experts, under each recompute mode."""
        parts = [mesh.ep] if mesh.ep > 1 else self.expert_parts(section, mesh.tp, mesh.dp, mesh.cp)
        return [c for n in parts for c in self.recompute_variants(section, mesh._replace(ep=n), size)]

    def _rank_load(self, section: str, shape: ReplicaShape) -> SectionLoad:
        return compute_rank_load(self.base.work.loads[section], shape, self.base.work.cluster)

    def _recompute_variants(self, section: str, mesh: MeshShape, size: int) -> list[Candidate]:
        """A configuration under each recompute mode, the fastest first."""
        load, work = self.rank_load(section, mesh.replica), self.base.work
        sharding = (
            "none" if not load.cost.trainable or load.mode == "forward" or work.unshardable else "zero1"
        )
        return [
            price_candidate(work, load, mesh.dp, size, sharding, way)
            for way in (RECOMPUTE_MODES if load.mode != "forward" else RECOMPUTE_MODES[:1])
        ]

    # -- memory

    def _candidate_memory(self, section: str, c: Candidate) -> RankMemory:
        """Memory of a rank with micro-batches that hold as many of the largest samples as their tokens
        allow."""
        load, work = self.rank_load(section, c.shape), self.base.work
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
        """A section on these ranks; `more` is its `extra_in_flight`."""
        return SectionLayout(
            c, tuple(ranks), self.candidate_memory(section, c), self._alternating_in_flight(section, c), more
        )

    def _alternating_in_flight(self, section: str, c: Candidate) -> int:
        return in_flight_alternating(self.base.work, self.rank_load(section, c.shape), c.micro_batches)

    def max_in_flight(self, section: str, c: Candidate) -> int:
        """Number of micro-batches that a rank without other sections can hold between forward and
        backward."""
        memory = self.candidate_memory(section, c)
        return max(1, (self.capacity - memory.total_bytes(0)) // max(1, memory.activation))

    def first_fitting(
        self,
        variants: Mapping[str, Sequence[Candidate]],
        make_layout: Callable[[ChosenCandidates], BaselineLayout],
        time: Callable[[ChosenCandidates], int],
    ) -> Iterator[tuple[int, BaselineLayout]]:
        """Yields (time, layout) of the fastest recompute modes that fit the memory of all ranks, if any."""
        choices = (dict(zip(variants, chosen, strict=True)) for chosen in product(*variants.values()))
        for chosen in sorted(choices, key=time):
            layout = make_layout(chosen)
            if layout.peak_bytes() <= self.capacity:
                yield time(chosen), layout
                return

    # -- sections apart

    def _separate_choices(self, powers: bool, anchor: str) -> list[ChosenCandidates]:
        """The best ways to give each section its own devices, with powers of two (`powers`) or any numbers of
        replicas.

        The closed-form time is the slowest section, a part of the others and the pipeline's fill; for
        sections that cannot hold all their micro-batches, also a round trip through the anchor for each round
        of their in-flight budget.
        """
        tables = [self._fastest_by_ranks(name, powers, name == anchor) for name in self.names]
        holding = (
            (n, c)
            for n, groups in zip(self.names, tables, strict=True)
            if n in self.awaited
            for c in chain(*groups)
        )
        rounds = {(n, c): -(-c.micro_batches // self.max_in_flight(n, c)) for n, c in holding}
        # heap of (-time, -number, choice) for each configuration of the anchor
        best: defaultdict[int, list[tuple[int, int, ChosenCandidates]]] = defaultdict(list)
        for number, combination in enumerate(_iterate_products(tables, self.ranks)):
            best_of_anchor = best[id(combination[self.names.index(anchor)])]
            if (
                len(best_of_anchor) == VARIANTS_PER_ANCHOR
                and max(c.time_ns for c in combination) > -best_of_anchor[0][0]
            ):
                continue
            chosen = dict(zip(self.names, combination, strict=True))
            trip = chosen[anchor].fill_ns + chosen[anchor].drain_ns
            times = [max(c.time_ns, (rounds.get((n, c), 1) - 1) * trip) for n, c in chosen.items()]
            time = (
                max(times)
                + (sum(times) - max(times)) // WAIT_DIVISOR
                + sum(c.fill_ns for c in combination[:-1])
            )
            heapq.heappush(best_of_anchor, (-time, -number, chosen))
            if len(best_of_anchor) > VARIANTS_PER_ANCHOR:
                heapq.heappop(best_of_anchor)
        every = sorted(
            (entry for best_of_anchor in best.values() for entry in best_of_anchor),
            key=lambda entry: entry[:2],
            reverse=True,
        )
        return [chosen for _, _, chosen in every[:MAX_RANKED_LAYOUTS]]

    def _fastest_by_ranks(self, section: str, powers: bool, anchor: bool) -> list[list[Candidate]]:
        """Returns the fastest configuration for each number of devices, leaving out numbers of devices that
        are no faster than a smaller one.

        For the anchor one list for each micro-batch size; for sections that wait for others' backwards one
        for each recompute mode.
        """
        fastest: defaultdict[tuple[str, int], dict[int, Candidate]] = defaultdict(dict)
        max_ranks = self.ranks - len(self.names) + 1
        for tp, pp, cp in (
            (t, p, c)
            for t, p in product(self.tp_degrees(), self.stage_counts(section))
            for c in self.row_parts(section, t, p)
            if t * p * c <= max_ranks
        ):
            most = max_ranks // (tp * pp * cp)
            for dp in powers_of_two(most) if powers else range(1, most + 1):
                for c in (
                    c
                    for n, ep in product(
                        self.micro_batch_sizes(section, dp), self.expert_parts(section, tp, dp, cp)
                    )
                    for c in self._useful_variants(section, MeshShape(tp, pp, dp, ep, cp), n)
                ):
                    by_ranks = fastest[
                        c.recompute if section in self.awaited else "", c.micro_batch if anchor else 0
                    ]
                    if c.ranks not in by_ranks or c.time_ns < by_ranks[c.ranks].time_ns:
                        by_ranks[c.ranks] = c
        return [
            _pareto_front([by_ranks[ranks] for ranks in sorted(by_ranks)]) for by_ranks in fastest.values()
        ]

    def _useful_variants(self, section: str, mesh: MeshShape, size: int) -> Iterator[Candidate]:
        """Yields the least recomputation that fits, and more while not all micro-batches that wait for
        others can be held."""
        for c in self.recompute_variants(section, mesh, size):
            if (
                self.candidate_memory(section, c).total_bytes(self._alternating_in_flight(section, c))
                <= self.capacity
            ):
                yield c
                if section not in self.awaited or self.max_in_flight(section, c) >= c.micro_batches:
                    return


def _pareto_front(configurations: Sequence[Candidate]) -> list[Candidate]:
    """Configurations that are faster than all before them."""
    front: list[Candidate] = []
    for c in configurations:
        if not front or c.time_ns < front[-1].time_ns:
            front.append(c)
    return front


def _iterate_products(
    tables: Sequence[Sequence[Sequence[Candidate]]], ranks: int
) -> Iterator[tuple[Candidate, ...]]:
    """Yields one configuration of each table on at most `ranks` devices; from each list of the last table
    the two with the most devices."""
    if len(tables) == 1:
        for configurations in tables[0]:
            end = bisect_right(configurations, ranks, key=lambda c: c.ranks)
            yield from ((c,) for c in configurations[max(0, end - 2) : end])
        return
    for c in chain(*tables[0]):
        for others in _iterate_products(tables[1:], ranks - c.ranks) if c.ranks < ranks else ():
            yield (c, *others)
