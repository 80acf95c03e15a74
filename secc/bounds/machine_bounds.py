"""Bounds on the time in which a number of machines can do jobs, each with a weight, a head and a tail: *sets*
and *packing* of `secc/bounds/bounds.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from secc.bounds.work import SampleVisit

# Up to this number of jobs every prefix is tried, beyond it prefixes that grow by a quarter.
MAX_TRIED_PREFIXES = 64


@dataclass(frozen=True, slots=True)
class BoundJob:
    weight: int
    head: int
    tail: int


def last_tail(u: SampleVisit) -> int:
    """Tail of a visit's last job."""
    late = u.backward_tail if u.second_part_tail is None else u.second_part_tail
    return u.forward_tail if late is None else late


def job_families(units: Sequence[SampleVisit]) -> Iterator[tuple[str, list[BoundJob]]]:
    """Yields (name, jobs): whole visits, forwards and backwards; with split backwards also all but either
    end of a visit."""
    with_backward = [
        (u, h, t) for u in units if (h := u.backward_head) is not None and (t := u.backward_tail) is not None
    ]
    totals = [u.forward_weight + u.backward_weight + u.second_part_weight for u in units]
    yield (
        "all work",
        [BoundJob(w, u.forward_head, last_tail(u)) for w, u in zip(totals, units, strict=True)],
    )
    if with_backward:
        yield "forwards", [BoundJob(u.forward_weight, u.forward_head, u.forward_tail) for u in units]
        yield "backwards", [BoundJob(u.backward_weight, h, t) for u, h, t in with_backward]
    if any(u.second_part for u in units):
        yield (
            "forwards and input gradients",
            [BoundJob(u.forward_weight + u.backward_weight, u.forward_head, t) for u, _, t in with_backward],
        )
        yield (
            "backwards and weights",
            [
                BoundJob(u.backward_weight + u.second_part_weight, h, last_tail(u))
                for u, h, _ in with_backward
            ],
        )


def best_set_bound(jobs: Sequence[BoundJob], ranks: int) -> int:
    """The largest *sets* bound over the tried prefixes."""
    orders = (
        sorted(jobs, key=lambda j: -j.weight),
        sorted(jobs, key=lambda j: -j.head),
        sorted(jobs, key=lambda j: -j.tail),
        sorted(jobs, key=lambda j: -j.head - j.tail),
    )
    best, sizes = 0, sorted(prefix_sizes(len(jobs)))
    for order in orders:
        works = list(accumulate(j.weight for j in order))
        heads, tails = [j.head for j in order], [j.tail for j in order]
        for k in sizes:
            best = _larger_set_bound(best, works[k - 1], heads[:k], tails[:k], min(ranks, k))
    return best


def _larger_set_bound(best: int, work: int, heads: list[int], tails: list[int], ranks: int) -> int:
    """Maximum of `best` and of the minimum over q of (work + q smallest heads + q smallest tails) / q,
    rounded up."""
    heads.sort()
    tails.sort()
    if -(-(work + sum(heads[:ranks]) + sum(tails[:ranks])) // ranks) <= best:
        return best  # the minimum is no larger than this for all ranks
    sums = zip(range(1, ranks + 1), accumulate(heads), accumulate(tails), strict=False)
    return max(best, min(-(-(work + h + t) // q) for q, h, t in sums))


def prefix_sizes(n: int) -> Iterable[int]:
    """Sizes of the prefixes to try: all up to `MAX_TRIED_PREFIXES`, beyond that growing by a quarter."""
    if n <= MAX_TRIED_PREFIXES:
        return range(1, n + 1)
    sizes, k = {n}, 1
    while k < n:
        sizes.add(k)
        k += max(1, k // 4)
    return sizes


def packing_bound(jobs: Sequence[BoundJob], ranks: int) -> int:
    """The largest *packing* bound over k."""
    order = sorted(jobs, key=lambda j: -j.weight)
    weights = list(accumulate(j.weight for j in order))
    heads = list(accumulate((j.head for j in order), min))
    tails = list(accumulate((j.tail for j in order), min))
    return _bound_by_packing(weights, heads, tails, ranks)


def _bound_by_packing(weights: Sequence[int], heads: Sequence[int], tails: Sequence[int], ranks: int) -> int:
    """`packing_bound` of jobs by falling weight, given sums of weights and least heads and tails up to
    each."""
    best = 0
    for k in range(1, (len(weights) - 1) // ranks + 1):
        last = k * ranks
        smallest = weights[last] - (weights[last - k - 1] if last > k else 0)
        best = max(best, heads[last] + smallest + tails[last])
    return best


class MachinePool:
    """Jobs that must be done on any number of machines, up to `most`: the least time that it takes.

    *Sets* has a minimum over the number q of machines with jobs of a set. For each tried set the running
    minima over q hold for all numbers of machines at once.
    """

    def __init__(self, jobs: Sequence[BoundJob], most: int) -> None:
        self.most = max(1, most)
        order = sorted(jobs, key=lambda j: -j.weight)
        self.weights = list(accumulate(j.weight for j in order))
        self.heads = list(accumulate((j.head for j in order), min))
        self.tails = list(accumulate((j.tail for j in order), min))
        self.sets = self._bound_by_sets(jobs).tolist()

    def bound_time(self, machines: int) -> int:
        """The larger bound by sets and packing."""
        machines = min(machines, self.most)
        return max(self.sets[machines - 1], _bound_by_packing(self.weights, self.heads, self.tails, machines))

    def _bound_by_sets(self, jobs: Sequence[BoundJob]) -> Tensor:
        """`best_set_bound` for 1 to `most` machines, as int64 [most]."""
        columns = torch.tensor([(j.weight, j.head, j.tail) for j in jobs], dtype=torch.int64)
        weights, heads, tails = columns.unbind(1)
        best = torch.zeros(self.most, dtype=torch.int64)
        for key in (weights, heads, tails, heads + tails):
            order = columns[torch.argsort(key, descending=True, stable=True)]
            for k in sorted(prefix_sizes(len(jobs))):
                used = min(k, self.most)
                count = torch.arange(1, used + 1)
                first, last = (order[:k, i].sort().values[:used].cumsum(0) for i in (1, 2))
                total = int(order[:k, 0].sum()) + first + last
                least = -torch.div(-total, count, rounding_mode="floor")
                least = least.cummin(0).values
                best[:used] = torch.maximum(best[:used], least)
                best[used:] = best[used:].clamp(min=int(least[-1]))
        return best
