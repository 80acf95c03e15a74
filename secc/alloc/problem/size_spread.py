"""Describes how the times of a section's samples differ, which a mean sample hides from closed forms.

A mean sample takes less than samples take on average where time grows faster than size. Samples of different
size are padded if they share a micro-batch, or leave replicas uneven if only similar ones do. Stages of a
pipeline wait where long micro-batches follow short ones, and ZeRO-3 replicas take as long as the longest in
each round. All this is computed from the listed samples' times on one rank; tp and stages scale all of them
by the same factor.
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
    """Relative times of a section's samples, in permille of their mean.

    `relative_times`: longest first, () where the graph lists no samples. `pattern_means[when]`: mean time of
    a pattern's samples over the time of its mean sample. `padding`: what padding adds (`_PaddingCost`).
    """

    relative_times: tuple[int, ...] = ()
    pattern_means: Mapping[PatternKeys, int] = field(default_factory=dict[PatternKeys, int])
    padding: _PaddingCost | None = field(default=None, repr=False, compare=False)
    # `mean_round_maximum` by its arguments; many shapes and layouts ask for the same ones
    cached_maxima: dict[tuple[int, int, int], int] = field(
        default_factory=dict[tuple[int, int, int], int], repr=False, compare=False
    )

    def mean_ns(self, when: PatternKeys, time_ns: int) -> int:
        """Average time of samples of pattern `when`, given the time of as many mean samples."""
        return time_ns * self.pattern_means.get(when, PERMILLE) // PERMILLE

    def longest_micro_batch(self, size: int) -> int:
        """Relative time of the longest micro-batch of `size` samples if samples of similar size share
        micro-batches."""
        longest = self.relative_times[:size]
        return sum(longest) // len(longest) if longest else 0

    def replica_imbalance(self, share: int, micro_batches: int) -> int:
        """Work of the busiest replica over that of the mean one, in permille, where each replica has `share`
        samples.

        The smaller of two: similar samples share micro-batches, and one replica has the longest of these; or
        each replica splits the samples that it has and pads them.
        """
        if self.padding is None:
            return PERMILLE
        size = max(1, share // micro_batches)
        with_similar = max(PERMILLE, self.longest_micro_batch(size) // micro_batches)
        return (
            with_similar
            if size == 1 or with_similar == PERMILLE
            else min(with_similar, max(PERMILLE, self.padding(share, size)))
        )

    def mean_round_maximum(self, rounds: int, replicas: int, size: int) -> int:
        """Longest micro-batch of a round as mean over the rounds, in permille, where similar samples share
        a round and each replica has `rounds` micro-batches."""
        if not self.relative_times:
            return PERMILLE
        key = rounds, replicas, size
        if key not in self.cached_maxima:
            count = rounds * replicas * size
            firsts = (i * replicas * size + j for i in range(rounds) for j in range(size))
            self.cached_maxima[key] = max(
                PERMILLE,
                sum(self.relative_times[first * len(self.relative_times) // count] for first in firsts)
                // (rounds * size),
            )
        return self.cached_maxima[key]


class _PaddingCost:
    """Time of listed samples in padded micro-batches over their time without padding, if samples go to
    replicas as they are listed."""

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
        """Ratio in permille for `share` samples on a replica in micro-batches of `size`; both are rounded
        up to powers of two."""
        key = 1 << (share - 1).bit_length(), 1 << (size - 1).bit_length()
        if key not in self.cached_ratios:
            padded, even = (sum(column) for column in zip(*self._padded_and_even_ns(*key), strict=True))
            self.cached_ratios[key] = PERMILLE * padded // max(1, even)
        return self.cached_ratios[key]

    def _padded_and_even_ns(self, share: int, size: int) -> Iterator[tuple[int, int]]:
        """Yields, for each micro-batch, its padded time and the time it would take if its samples had
        equal sizes."""
        for first in range(0, len(self.listed), share):
            by_pattern: dict[PatternKeys, list[SampleMeta]] = defaultdict(list)
            for s in self.listed[first : first + share]:
                by_pattern[s.pattern].append(s)
            for when, samples_of_pattern in by_pattern.items():
                samples_of_pattern.sort(key=lambda s: [s.sizes.get(name, 0) for name in self.widths])
                count = -(-len(samples_of_pattern) // size)
                for a, b in pairwise(i * len(samples_of_pattern) // count for i in range(count + 1)):
                    yield (
                        self._micro_batch_ns(when, samples_of_pattern[a:b], max),
                        self._micro_batch_ns(
                            when, samples_of_pattern[a:b], lambda widths: sum(widths) // len(widths)
                        ),
                    )

    def _micro_batch_ns(
        self,
        when: PatternKeys,
        samples_in_micro_batch: Sequence[SampleMeta],
        width: Callable[[list[int]], int],
    ) -> int:
        if (when, len(samples_in_micro_batch)) not in self.cached_means:
            self.cached_means[when, len(samples_in_micro_batch)] = micro_batch_sizes(
                self.graph, self.mean[when], len(samples_in_micro_batch)
            )
        sizes = dict(self.cached_means[when, len(samples_in_micro_batch)])
        for name in samples_in_micro_batch[0].sizes:
            values = [s.sizes[name] for s in samples_in_micro_batch]
            sizes[name] = width(values) if name in self.widths else sum(values)
        return evaluate_expr(self.time_ns, sizes)


def measure_spread(graph: GraphOp, active: Sequence[InputPattern], time_ns: str) -> SizeSpread:
    """Measures the spread of the listed samples' times `time_ns` (an expression) over the patterns
    `active`."""
    mean_sizes = {p.when: micro_batch_sizes(graph, p.sizes, 1) for p in active}
    listed = [
        s
        for s in next(iter(sample_sizes.draw_batches(graph, sample_sizes.SPREAD_SAMPLES, 1)), ())
        if s.pattern in mean_sizes
    ]
    times: dict[PatternKeys, list[int]] = defaultdict(list)
    for s in listed:
        times[s.pattern].append(evaluate_expr(time_ns, mean_sizes[s.pattern] | dict(s.sizes)))
    all_times = sorted((t for pattern_times in times.values() for t in pattern_times), reverse=True)
    if not sum(all_times):
        return SizeSpread()
    mean_sample_ns = {when: max(1, evaluate_expr(time_ns, mean_sizes[when])) for when in times}
    means = {
        when: PERMILLE * sum(pattern_times) // (len(pattern_times) * mean_sample_ns[when])
        for when, pattern_times in times.items()
    }
    return SizeSpread(
        tuple(PERMILLE * len(all_times) * t // sum(all_times) for t in all_times),
        means,
        _PaddingCost(graph, mean_sizes, time_ns, listed),
    )
