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

from secc.cost.model.patterns_and_transfers import Pattern, micro_batch
from secc.ir.analysis import sample_sizes
from secc.ir.dialect.ops import GraphOp
from secc.runtime.plan.expr_eval import evaluate
from secc.runtime.plan.step_program import SampleMeta

WHOLE = 1000  # one, in the units used here
DEALT = 256  # samples that are dealt to see what padding costs

When = frozenset[str]


@dataclass(frozen=True)
class Spread:
    """`sorted`: times of samples over their mean, the longest first, () where the graph lists none. `means`:
    for each pattern the samples' mean time over the mean sample's. In thousandths. `padding` tells what
    padding adds (`_Padding`)."""

    sorted: tuple[int, ...] = ()
    means: Mapping[When, int] = field(default_factory=dict[When, int])
    padding: _Padding | None = field(default=None, repr=False, compare=False)

    def mean(self, when: When, time_ns: int) -> int:
        """What samples take on average, given what as many mean ones take."""
        return time_ns * self.means.get(when, WHOLE) // WHOLE

    def longest(self, size: int) -> int:
        """The longest micro-batch of `size` samples, of which alike ones are together."""
        some = self.sorted[:size]
        return sum(some) // len(some) if some else 0

    def uneven(self, share: int, micro_batches: int) -> int:
        """The work of the busiest replica over the mean one's, where replicas have `share` samples each:
        either alike samples are together, and one replica has the longest micro-batch, or each replica cuts
        what it has."""
        if self.padding is None:
            return WHOLE
        size = max(1, share // micro_batches)
        alike = max(WHOLE, self.longest(size) // micro_batches)
        return alike if size == 1 or alike == WHOLE else min(alike, max(WHOLE, self.padding(share, size)))

    def in_rounds(self, rounds: int, replicas: int, size: int) -> int:
        """The mean over rounds of the longest micro-batch in each, where alike ones share a round and a
        replica has `rounds` of them."""
        if not self.sorted:
            return WHOLE
        count = rounds * replicas * size
        firsts = (i * replicas * size + j for i in range(rounds) for j in range(size))
        return max(
            WHOLE, sum(self.sorted[first * len(self.sorted) // count] for first in firsts) // (rounds * size)
        )


class _Padding:
    """What listed samples take in micro-batches over what they take alone, some dealt to replicas as they are
    listed and cut there."""

    def __init__(
        self,
        graph: GraphOp,
        mean: Mapping[When, Mapping[str, int]],
        time_ns: str,
        listed: Sequence[SampleMeta],
    ) -> None:
        self.graph, self.mean, self.time_ns, self.listed = graph, mean, time_ns, listed[:DEALT]
        self.widths = [name for name, op in graph.symbols.items() if op.kind.data == "width"]
        self.known: dict[tuple[int, int], int] = {}
        self.means: dict[tuple[When, int], Mapping[str, int]] = {}

    def __call__(self, share: int, size: int) -> int:
        key = 1 << (share - 1).bit_length(), 1 << (size - 1).bit_length()
        if key not in self.known:
            padded, even = (sum(column) for column in zip(*self._lots(*key), strict=True))
            self.known[key] = WHOLE * padded // max(1, even)
        return self.known[key]

    def _lots(self, share: int, size: int) -> Iterator[tuple[int, int]]:
        """For each micro-batch what it takes, and what it would take if its samples were equally large."""
        for first in range(0, len(self.listed), share):
            groups: dict[When, list[SampleMeta]] = defaultdict(list)
            for s in self.listed[first : first + share]:
                groups[s.pattern].append(s)
            for when, some in groups.items():
                some.sort(key=lambda s: [s.sizes.get(name, 0) for name in self.widths])
                count = -(-len(some) // size)
                for a, b in pairwise(i * len(some) // count for i in range(count + 1)):
                    yield (
                        self._time(when, some[a:b], max),
                        self._time(when, some[a:b], lambda widths: sum(widths) // len(widths)),
                    )

    def _time(self, when: When, lot: Sequence[SampleMeta], width: Callable[[list[int]], int]) -> int:
        if (when, len(lot)) not in self.means:
            self.means[when, len(lot)] = micro_batch(self.graph, self.mean[when], len(lot))
        sizes = dict(self.means[when, len(lot)])
        for name in lot[0].sizes:
            found = [s.sizes[name] for s in lot]
            sizes[name] = width(found) if name in self.widths else sum(found)
        return evaluate(self.time_ns, sizes)


def spread(graph: GraphOp, active: Sequence[Pattern], time_ns: str) -> Spread:
    """The spread of what the listed samples of some patterns take."""
    mean = {p.when: micro_batch(graph, p.sizes, 1) for p in active}
    listed = [s for s in next(iter(sample_sizes.drawn(graph, sample_sizes.MOST, 1)), ()) if s.pattern in mean]
    times: dict[When, list[int]] = defaultdict(list)
    for s in listed:
        times[s.pattern].append(evaluate(time_ns, mean[s.pattern] | dict(s.sizes)))
    every = sorted((t for some in times.values() for t in some), reverse=True)
    if not sum(every):
        return Spread()
    alone = {when: max(1, evaluate(time_ns, mean[when])) for when in times}
    means = {when: WHOLE * sum(some) // (len(some) * alone[when]) for when, some in times.items()}
    return Spread(
        tuple(WHOLE * len(every) * t // sum(every) for t in every),
        means,
        _Padding(graph, mean, time_ns, listed),
    )
