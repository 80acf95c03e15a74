"""The configurations that baselines search: a section's replicas, tensor parallelism, stages and micro-batches, ranked in closed form.

Tensor parallelism is a power of two inside a node, stages a power of two up to the layers, micro-batches have 1 to 16 mean samples.
Optimizer states are sharded wherever there is something to shard, as Megatron's distributed optimizer does, and layers are recomputed
only as far as memory asks.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from secc.alloc.candidates import Load, candidate, on_rank, room
from secc.alloc.types import Candidate
from secc.baselines.layout import Base, layers

SIZES = (1, 2, 4, 8, 16)
MOST_STAGES = 16
SIMULATED = 10  # layouts of a baseline that are simulated

Chosen = Mapping[str, Candidate]


class Space:
    """The configurations of each section of a plan. Those made once are kept."""

    def __init__(self, base: Base) -> None:
        self.base, self.ranks = base, base.ranks
        self.capacity = base.work.cluster.device.usable
        self.names = list(base.work.loads)
        self.rank = cache(self._rank)
        self.at = cache(self._at)

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

    def _at(self, section: str, tp: int, pp: int, dp: int, size: int, capacity: int | None = None) -> Candidate | None:
        """The configuration with the least recomputation that fits, None if none does. `capacity`: bytes on a rank, 0 for any number."""
        load, work = self.rank(section, tp, pp), self.base.work
        sharding = "none" if not load.cost.trainable or load.mode == "forward" or work.unshardable else "zero1"
        limit = self.capacity if capacity is None else capacity
        for recompute in ("none", "selective", "full") if load.mode != "forward" else ("none",):
            found = candidate(work, load, dp, size, sharding, recompute)
            if not limit or found.memory <= limit:
                return found
        return None

    def in_flight(self, section: str, c: Candidate) -> int:
        """How many micro-batches a rank that has nothing else can hold between forward and backward."""
        load, work = self.rank(section, c.tp, c.pp), self.base.work
        rank = room(work, load, c.dp, c.micro_batch, c.sharding, c.recompute, c.micro_batches)
        return max(1, (self.capacity - rank.total(0)) // max(1, rank.activation))

    # -- sections apart -----------------------------------------------------------------------------------------------------------

    def apart(self, dps: Callable[[int], Sequence[int]]) -> list[Chosen]:
        """The best ways to give each section its own devices, the slowest section and the pipeline's fill counted."""
        tables = [self._table(name, dps) for name in self.names]
        best: list[tuple[int, int, Chosen]] = []
        for number, chosen in enumerate(_products(tables, self.ranks)):
            time = max(c.time_ns for c in chosen) + sum(c.fill_ns for c in chosen[:-1])
            entry = (-time, -number, dict(zip(self.names, chosen, strict=True)))
            if len(best) < SIMULATED:
                heapq.heappush(best, entry)
            elif entry > best[0]:
                heapq.heapreplace(best, entry)
        return [chosen for _, _, chosen in sorted(best, key=lambda e: e[:2], reverse=True)]

    def _table(self, section: str, dps: Callable[[int], Sequence[int]]) -> list[Candidate]:
        """The fastest configuration for each number of devices, those that more devices do not make faster left out."""
        fastest: dict[int, Candidate] = {}
        most = self.ranks - len(self.names) + 1
        for tp in self.widths():
            for pp in self.depths(section):
                for dp in dps(most // (tp * pp)):
                    fitting = [c for n in self.sizes(section, dp) if (c := self.at(section, tp, pp, dp, n)) is not None]
                    for c in fitting:
                        if c.ranks not in fastest or c.time_ns < fastest[c.ranks].time_ns:
                            fastest[c.ranks] = c
        kept: list[Candidate] = []
        for ranks in sorted(fastest):
            if not kept or fastest[ranks].time_ns < kept[-1].time_ns:
                kept.append(fastest[ranks])
        return kept


def _products(tables: Sequence[Sequence[Candidate]], ranks: int) -> Iterator[tuple[Candidate, ...]]:
    """One configuration of each table, on at most `ranks` devices; of the last table the two with the most devices that are left."""
    if len(tables) == 1:
        yield from ((c,) for c in [c for c in tables[0] if c.ranks <= ranks][-2:])
        return
    for c in tables[0]:
        for rest in _products(tables[1:], ranks - c.ranks) if c.ranks < ranks else ():
            yield (c, *rest)


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(max(1, most).bit_length())]
