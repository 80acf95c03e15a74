"""Dealing work to ranks: each piece in turn to the least loaded, or to each rank one of every round."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

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


def balance_rounds(weights: Sequence[int], ranks: Ranks, load: dict[int, int]) -> list[int]:
    """`balance` for ranks that work in rounds, in which all wait for the longest piece: of as many neighbours as there are ranks each rank
    gets one, so that pieces ordered by weight have alike ones in their round."""
    owner: list[int] = []
    for first in range(0, len(weights), len(ranks)):
        least = sorted(range(len(ranks)), key=lambda r: load.get(ranks[r], 0))
        for weight, r in zip(weights[first : first + len(ranks)], least, strict=False):
            load[ranks[r]] = load.get(ranks[r], 0) + weight
            owner.append(r)
    return owner
