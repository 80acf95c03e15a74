"""What mean samples leave out of closed forms: the spread of a section's times over the samples that the
graph lists.

A mean sample takes less than samples take on average where time grows faster than size. Samples that differ
are padded where they share a micro-batch, or leave replicas uneven where only alike ones do. Stages of a
pipeline wait where long micro-batches follow short ones, and replicas that gather parameters together take as
long as the longest of each round. All is known from the times of the listed samples on one rank; tp and
stages change all of them alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from secc.cost.model.patterns_and_transfers import InputPattern, micro_batch_sizes
from secc.ir.analysis import sample_sizes
from secc.ir.dialect.ops import GraphOp
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.step_program import SampleMeta

PERMILLE = 1000  # one, in the units used here
PADDING_SAMPLES = 256  # samples that are dealt to see what padding costs

PatternKeys = frozenset[str]


@dataclass(frozen=True)
class SizeSpread:
    """`sorted`: times of samples over their mean, the longest first, () where the graph lists none. `means`:
    for each pattern the samples' mean time over the mean sample's. In thousandths. `padding` tells what
    padding adds (`_Padding`)."""

    relative_times: tuple[int, ...] = ()
    pattern_means: Mapping[PatternKeys, int] = field(default_factory=dict[PatternKeys, int])
    padding: _PaddingCost | None = field(default=None, repr=False, compare=False)

    def mean_ns(self, when: PatternKeys, time_ns: int) -> int:
        """What samples take on average, given what as many mean ones take."""
        return time_ns * self.pattern_means.get(when, PERMILLE) // PERMILLE

    def longest_micro_batch(self, size: int) -> int:
        """The longest micro-batch of `size` samples, of which alike ones are together."""
        some = self.relative_times[:size]
        return sum(some) // len(some) if some else 0

    def replica_imbalance(self, share: int, micro_batches: int) -> int:
        """The work of the busiest replica over the mean one's, where replicas have `share` samples each:
        either alike samples are together, and one replica has the longest micro-batch, or each replica cuts
        what it has."""
        if self.padding is None:
            return PERMILLE
        size = max(1, share // micro_batches)
        alike = max(PERMILLE, self.longest_micro_batch(size) // micro_batches)
        return (
            alike if size == 1 or alike == PERMILLE else min(alike, max(PERMILLE, self.padding(share, size)))
        )

    def mean_round_maximum(self, rounds: int, replicas: int, size: int) -> int:
        """The mean over rounds of the longest micro-batch in each, where alike ones share a round and a
        replica has `rounds` of them."""
        if not self.relative_times:
            return PERMILLE
        count = rounds * replicas * size
        firsts = (i * replicas * size + j for i in range(rounds) for j in range(size))
        return max(
            PERMILLE,
            sum(self.relative_times[first * len(self.relative_times) // count] for first in firsts)
            // (rounds * size),
        )


class _PaddingCost:
    """What listed samples take in micro-batches over what they take alone, some dealt to replicas as they are
    listed and cut there."""

    def __init__(
        self,
        graph: GraphOp,
        mean: Mapping[PatternKeys, Mapping[str, int]],
        time_ns: str,
        listed: Sequence[SampleMeta],
    ) -> None:
        self.graph, self.mean, self.time_ns, self.listed = graph, mean, time_ns, listed[:PADDING_SAMPLES]
        self.widths = [name for name, op in graph.symbols.items() if op.kind.data == "width"]
        self.cached_ratios: dict[tuple[int, int], int] = {}
        self.cached_means: dict[tuple[PatternKeys, int], Mapping[str, int]] = {}

    def __call__(self, share: int, size: int) -> int:
        key = 1 << (share - 1).bit_length(), 1 << (size - 1).bit_length()
        if key not in self.cached_ratios:
            padded, even = (sum(column) for column in zip(*self._padded_and_even_ns(*key), strict=True))
            self.cached_ratios[key] = PERMILLE * padded // max(1, even)
        return self.cached_ratios[key]

    def _padded_and_even_ns(self, share: int, size: int) -> Iterator[tuple[int, int]]:
        """For each micro-batch what it takes, and what it would take if its samples were equally large."""
        for first in range(0, len(self.listed), share):
            groups: dict[PatternKeys, list[SampleMeta]] = defaultdict(list)
            for s in self.listed[first : first + share]:
                groups[s.pattern].append(s)
            for when, some in groups.items():
                some.sort(key=lambda s: [s.sizes.get(name, 0) for name in self.widths])
                count = -(-len(some) // size)
                for a, b in pairwise(i * len(some) // count for i in range(count + 1)):
                    yield (
                        self._micro_batch_ns(when, some[a:b], max),
                        self._micro_batch_ns(when, some[a:b], lambda widths: sum(widths) // len(widths)),
                    )

    def _micro_batch_ns(
        self, when: PatternKeys, lot: Sequence[SampleMeta], width: Callable[[list[int]], int]
    ) -> int:
        if (when, len(lot)) not in self.cached_means:
            self.cached_means[when, len(lot)] = micro_batch_sizes(self.graph, self.mean[when], len(lot))
        sizes = dict(self.cached_means[when, len(lot)])
        for name in lot[0].sizes:
            found = [s.sizes[name] for s in lot]
            sizes[name] = width(found) if name in self.widths else sum(found)
        return evaluate_expr(self.time_ns, sizes)


def measure_spread(graph: GraphOp, active: Sequence[InputPattern], time_ns: str) -> SizeSpread:
    """The spread of what the listed samples of some patterns take."""
    mean = {p.when: micro_batch_sizes(graph, p.sizes, 1) for p in active}
    listed = [
        s
        for s in next(iter(sample_sizes.draw_batches(graph, sample_sizes.MAX_LISTED_SAMPLES, 1)), ())
        if s.pattern in mean
    ]
    times: dict[PatternKeys, list[int]] = defaultdict(list)
    for s in listed:
        times[s.pattern].append(evaluate_expr(time_ns, mean[s.pattern] | dict(s.sizes)))
    every = sorted((t for some in times.values() for t in some), reverse=True)
    if not sum(every):
        return SizeSpread()
    alone = {when: max(1, evaluate_expr(time_ns, mean[when])) for when in times}
    means = {when: PERMILLE * sum(some) // (len(some) * alone[when]) for when, some in times.items()}
    return SizeSpread(
        tuple(PERMILLE * len(every) * t // sum(every) for t in every),
        means,
        _PaddingCost(graph, mean, time_ns, listed),
    )
