"""Dealing work to ranks: each piece in turn to the least loaded."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

Ranks = tuple[int, ...]


def balance(weights: Iterable[int], ranks: Ranks, load: dict[int, int]) -> list[int]:
    """The index into `ranks` for each weight. `load` is what each rank does already; this work is added to it.

    Among equally loaded ranks the one with the fewest pieces goes first, then the first.
    """
    heap = [(load.get(rank, 0), 0, r) for r, rank in enumerate(ranks)]
    heapq.heapify(heap)
    owner: list[int] = []
    for weight in weights:
        busy, count, r = heap[0]
        heapq.heapreplace(heap, (busy + weight, count + 1, r))
        owner.append(r)
    for busy, _, r in heap:
        load[ranks[r]] = busy
    return owner
