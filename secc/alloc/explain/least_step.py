"""A lower bound on the step of every plan that the solver may choose: any parallelism and number of replicas
of each section, any sharing of devices, any micro-batches and any order.

The plan bound of `secc.bounds` counts the work at a plan's own degrees, so plans with other degrees may beat
it. Here each section does the least work that any of its candidates does which has room for its weights and
its micro-batches of one sample:

*Even.* A rank of a stage is busy with a micro-batch for at least the sum of its samples' weights
(`secc.bounds.additive`). Summed over a replica's stages and ranks this is a sample's work. No rank is busy
for longer than the step, so the step takes at least all work over the number of ranks.

*Chain.* A sample's forwards along the edges and its backwards against them follow one another, and each takes
at least as long as for the sample alone, in all stages. Forwards of sections without a backward do not count:
they may run in the step before.

Messages, waits, gradient sums and the optimizer count as nothing. Prices are those of the search, so its
`simulated_s` can be held against the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from secc.alloc.problem.build_problem import expert_parts, list_rank_loads, parallel_shapes
from secc.alloc.problem.candidate_memory import memory_on_rank
from secc.alloc.problem.in_flight import in_flight_alternating
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.types import ReplicaShape
from secc.alloc.problem.workload import Workload
from secc.alloc.refine.schedule_evaluation import BatchSamples, plan_symbols
from secc.bounds.additive import split_additive
from secc.ir.dialect.ops import strings_of
from secc.runtime.plan.batch_sizes import combine_sizes
from secc.runtime.plan.expr_eval import evaluate_expr_tensor
from secc.runtime.plan.int_columns import int_tensor
from secc.runtime.plan.sample_predicates import is_active

MOST_NS = 1 << 52  # of one sample, so that integers of 64 bits hold what it adds on all ranks of a replica


@dataclass(frozen=True)
class _SampleTimes:
    """Of each active sample of a section, in their order: ns of rank time that it adds however micro-batches
    are formed, and ns that its forward and its backward take alone, as int64 tensors [active samples]."""

    work: Tensor
    forward: Tensor
    backward: Tensor

    def least_of_each(self, other: _SampleTimes) -> _SampleTimes:
        """The lesser figure of each sample."""
        return _SampleTimes(
            torch.minimum(self.work, other.work),
            torch.minimum(self.forward, other.forward),
            torch.minimum(self.backward, other.backward),
        )


def bound_every_plan(work: Workload, pins: Pins, ranks: int, batches: Sequence[BatchSamples]) -> int:
    """Mean ns that a step takes at least with these global batches, on `ranks` devices, under any plan that
    `secc.alloc.problem.build_problem` allows. 0 where a section has no candidate with enough memory."""
    measure = _BatchTimes(work, batches)
    chain: dict[str, tuple[list[int], list[int]]] = {}
    totals = [0] * len(batches)
    for name, load in work.loads.items():
        ways = [
            times
            for own in work.by_kind or (work,)
            for times in measure.list_fitting(own, own.loads[name], pins, ranks)
        ]
        if not ways:
            return 0
        active = measure.active_samples(load)
        sums = [measure.sum_by_batch(active, times.work) for times in ways]
        totals = [total + min(own) for total, own in zip(totals, zip(*sums, strict=True), strict=True)]
        least = reduce(_SampleTimes.least_of_each, ways)
        chain[name] = _extend_chains(work, load, chain, active, least, len(measure.batch_of))
    longest = [0] * len(batches)
    for paths in chain.values():
        for batch, ns in zip(measure.batch_of, map(max, *paths), strict=True):
            longest[batch] = max(longest[batch], ns)
    steps = [max(-(-total // ranks), chained) for total, chained in zip(totals, longest, strict=True)]
    return sum(steps) // max(1, len(steps))


def _extend_chains(
    work: Workload,
    load: SectionLoad,
    before: Mapping[str, tuple[list[int], list[int]]],
    active: Sequence[int],
    times: _SampleTimes,
    count: int,
) -> tuple[list[int], list[int]]:
    """Ns of the longest paths of each sample that end with a section's forward, and with forwards up to the
    section and backwards from there; `before` has those of the sections that feed it."""
    forward, both = [0] * count, [0] * count
    own_times = zip(active, times.forward.tolist(), times.backward.tolist(), strict=True)
    for p, own, own_backward in own_times:
        sources = [(before[e.src], e.grad) for e in work.crossings if e.dst == load.name]
        arrival = max((forwards[p] for (forwards, _), _ in sources), default=0)
        returned = max((boths[p] if grad else forwards[p] for (forwards, boths), grad in sources), default=0)
        if load.mode != "forward":
            forward[p] = arrival + own
            both[p] = max(arrival, returned) + own + own_backward
    return forward, both


class _BatchTimes:
    """Times of the samples of some global batches under candidates of sections. batch_of: the index of each
    sample's batch, by the sample's position in all of them."""

    def __init__(self, work: Workload, batches: Sequence[BatchSamples]) -> None:
        graph = work.graph
        self.batch_of = [i for i, batch in enumerate(batches) for _ in batch]
        self._samples, self._symbols = [sample for batch in batches for sample in batch], plan_symbols(graph)
        self._most_together = max(map(len, batches), default=1)
        self._sizes: list[Mapping[str, int]] = []
        self._cached: dict[object, _SampleTimes] = {}
        for batch in batches:
            sizes: list[Mapping[str, int]] = [sample.sizes for sample in batch]
            if graph.widths is not None and graph.widths.data == "global":
                combined = combine_sizes(sizes, self._symbols)
                widths = {s.name: combined[s.name] for s in self._symbols if s.is_padded}
                sizes = [{**own, **widths} for own in sizes]
            self._sizes += sizes

    def active_samples(self, load: SectionLoad) -> list[int]:
        """The positions of the samples that activate a section."""
        when = strings_of(load.section.when)
        return [p for p, sample in enumerate(self._samples) if is_active(when, sample.pattern)]

    def sum_by_batch(self, active: Sequence[int], figures: Tensor) -> list[int]:
        """Sums of figures of active samples, one for each batch."""
        found = [0] * (1 + max(self.batch_of, default=-1))
        for p, figure in zip(active, figures.tolist(), strict=True):
            found[self.batch_of[p]] += figure
        return found

    def list_fitting(
        self, work: Workload, load: SectionLoad, pins: Pins, ranks: int
    ) -> Iterator[_SampleTimes]:
        """Yields the times under each way to run a section that fits a rank's memory with as many replicas as
        there can be, which need least. What fits without recomputation takes longer with it."""
        active = self.active_samples(load)
        columns = {name: int_tensor([self._sizes[p][name] for p in active]) for name in self._sizes[0]}
        for shape in parallel_shapes(work, load, pins, ranks):
            fitting: dict[ReplicaShape, dict[str, SectionLoad]] = {}
            for ep in expert_parts(work, load, pins, shape, ranks):
                for (sharding, recompute), _, loads in list_rank_loads(
                    work, load, shape._replace(ep=ep), pins
                ):
                    for rank in loads:
                        found = fitting.setdefault(rank.shape, {})
                        if not found.keys() & {"none", recompute} and _has_room(
                            work, rank, ranks, sharding, recompute
                        ):
                            found[recompute] = rank
            for found in fitting.values():
                for recompute, rank in found.items():
                    if recompute == "none" or "none" not in found:
                        yield self._times_of(work, load, rank, recompute, len(active), columns)

    def _times_of(
        self,
        work: Workload,
        load: SectionLoad,
        rank: SectionLoad,
        recompute: str,
        count: int,
        columns: Mapping[str, Tensor],
    ) -> _SampleTimes:
        """Times of `count` active samples on replicas of a rank's shape. A sample may be computed by a
        subgroup of the ranks of cp."""
        cp = rank.shape.cp
        found: list[_SampleTimes] = []
        for ranks in (n for n in range(1, cp + 1) if cp % n == 0):
            shape = rank.shape._replace(cp=ranks)
            # The same subgroups occur under several cp.
            key = work.cluster.device.kind, load.name, shape, rank.row_attention, recompute
            if key not in self._cached:
                own = rank if ranks == cp else work.rank_load(load, shape, rank.row_attention)
                self._cached[key] = self._times_on_ranks(own, recompute, count, columns)
            found.append(self._cached[key])
        return reduce(_SampleTimes.least_of_each, found)

    def _times_on_ranks(
        self, rank: SectionLoad, recompute: str, count: int, columns: Mapping[str, Tensor]
    ) -> _SampleTimes:
        """Times where all ranks of cp share each sample."""
        forward_ns, backward_ns = rank.pass_ns(recompute)
        (forward, added), (backward, also_added) = (
            self._times_of_stages(rank, text, columns, count)
            for text in (forward_ns, "0" if rank.mode == "forward" else backward_ns)
        )
        return _SampleTimes(rank.shape.tp * rank.shape.cp * (added + also_added), forward, backward)

    def _times_of_stages(
        self, rank: SectionLoad, text: str, columns: Mapping[str, Tensor], count: int
    ) -> tuple[Tensor, Tensor]:
        """(ns of each sample alone, ns that it adds at least to any micro-batch), summed over the stages,
        where the rank with the longest stages takes `text`. Each stage's time is rounded down."""
        values: dict[str, Tensor] = {"0": torch.zeros(count, dtype=torch.int64)}

        def add_up(terms: Sequence[str]) -> Tensor:
            for term in terms:
                if term not in values:  # there are many branches of few terms
                    values[term] = evaluate_expr_tensor(term, columns, count, MOST_NS)
            return reduce(torch.add, map(values.__getitem__, terms), values["0"]).clamp(max=MOST_NS)

        branches = [
            (add_up(parts.additive_terms), add_up(parts.rest_terms))
            for parts in split_additive(text, self._symbols)
        ]
        added = max(
            (additive + rest // self._most_together for additive, rest in branches),
            key=lambda ns: sum(ns.tolist()),
        )
        alone = reduce(torch.maximum, (additive + rest for additive, rest in branches))
        return _sum_over_stages(rank, alone), _sum_over_stages(rank, added)


def _sum_over_stages(rank: SectionLoad, ns: Tensor) -> Tensor:
    """The ns that all stages take together, each rounded down, where the rank with the longest stages takes
    `ns`."""
    stages, least = rank.shape.stages, ns.clamp(min=0)
    if stages == 1:
        return least
    whole, part = rank.stages.longest.numerator, rank.stages.longest.denominator
    if len(ns) and int(least.max()) * part >= 1 << 63:
        return int_tensor([max(0, rank.stages.sum_over(n) - stages) for n in least.tolist()])
    return (least * part // whole - stages).clamp(min=0)


def _has_room(work: Workload, rank: SectionLoad, ranks: int, sharding: str, recompute: str) -> bool:
    """Whether a rank has memory for its part of a section, with the most replicas that `ranks` devices hold
    and micro-batches of one sample."""
    dp = max(1, min(ranks // rank.shape.ranks, work.global_batch))
    samples = -(-work.active_sample_count(rank) // dp)
    size, count = (samples, 1) if work.whole_batch_kind(rank) else (1, samples)
    memory = memory_on_rank(work, rank, dp, size, sharding, recompute, count)
    held = memory.total_bytes(in_flight_alternating(work, rank, count))
    return held <= work.cluster.device.usable_memory
