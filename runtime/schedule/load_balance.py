"""Assigns pieces of work to ranks, each to the least loaded rank (Graham's list scheduling; LPT if the
largest come first) or round by round, and balances the result by swaps.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Ranks = tuple[int, ...]
WorkPiece = tuple[int, int, int]  # kind, weight, index

BALANCE_TOLERANCE_DIVISOR = 500  # ranks are balanced if the busiest exceeds the mean by at most 1/500
SWAP_PARTNERS = 4  # how many of the least busy ranks the busiest one tries first
SWAPS_PER_RANK = 2  # limit on the number of swaps


def assign_least_loaded(weights: Iterable[int], ranks: Ranks, load: dict[int, int]) -> list[int]:
    """Assigns each weight to the least loaded rank; returns indices into `ranks`.

    `load` is what each rank does already; the new work is added to it. Ties go to the rank with the fewest
    pieces, then to the first.
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


def assign_in_rounds(
    weights: Sequence[int], ranks: Ranks, load: dict[int, int], together: int
) -> tuple[list[int], int]:
    """Assigns one piece of every round to each of `together` consecutive ranks; returns indices into `ranks`,
    and the time of the group of ranks that takes longest.

    For ranks that wait in each round for its longest piece. Consecutive pieces form a round, so weights
    should be sorted: then the pieces of a round are similar. A round goes to the group with the least time.
    """
    groups = [range(first, first + together) for first in range(0, len(ranks), together)]
    times = [(max(load.get(ranks[r], 0) for r in group), i) for i, group in enumerate(groups)]
    heapq.heapify(times)
    owner: list[int] = []
    for first in range(0, len(weights), together):
        time, i = times[0]
        heapq.heapreplace(times, (time + weights[first], i))
        by_load = sorted(groups[i], key=lambda r: load.get(ranks[r], 0))
        for weight, r in zip(weights[first : first + together], by_load, strict=False):
            load[ranks[r]] = load.get(ranks[r], 0) + weight
            owner.append(r)
    return owner, max(time for time, _ in times)


def swap_until_balanced(
    kinds: Sequence[int], weights: Sequence[int], owner: list[int], ranks: Ranks, load: dict[int, int]
) -> None:
    """Swaps pieces of one kind between the busiest rank and others as long as the busier of both gets less
    work.

    Changes `owner`, the index into `ranks` for each piece, and `load`.
    """
    pieces_by_rank: list[list[WorkPiece]] = [[] for _ in ranks]
    for piece in sorted(zip(kinds, weights, range(len(owner)), strict=True)):
        pieces_by_rank[owner[piece[2]]].append(piece)
    busy = [load.get(rank, 0) for rank in ranks]
    enough = sum(busy) // len(busy) * (BALANCE_TOLERANCE_DIVISOR + 1) // BALANCE_TOLERANCE_DIVISOR
    for _ in range(SWAPS_PER_RANK * len(ranks)):
        *others, busiest = sorted(range(len(ranks)), key=busy.__getitem__)
        if busy[busiest] <= enough:
            break
        swap = _find_best_swap(pieces_by_rank, busy, busiest, others[:SWAP_PARTNERS]) or _find_best_swap(
            pieces_by_rank, busy, busiest, others[SWAP_PARTNERS:]
        )
        if swap is None:
            break
        for source, target, piece in ((busiest, swap.other, swap.given), (swap.other, busiest, swap.taken)):
            pieces_by_rank[source].remove(piece)
            insort(pieces_by_rank[target], piece)
            busy[source] = busy[source] - piece[1]
            busy[target] = busy[target] + piece[1]
            owner[piece[2]] = target
    load |= zip(ranks, busy, strict=True)


class _Swap(NamedTuple):
    """A swap of two pieces between the busiest rank and `other`; compared by the resulting larger load."""

    busier_load: int
    other: int
    given: WorkPiece
    taken: WorkPiece


def _find_best_swap(
    pieces_by_rank: Sequence[Sequence[WorkPiece]], busy: Sequence[int], top: int, others: Iterable[int]
) -> _Swap | None:
    """Returns the swap of rank `top` with one of `others` that reduces the larger load most; None if none
    does.

    The pieces of a rank are sorted by kind and weight.
    """
    best: _Swap | None = None
    for r in others:
        gap = busy[top] - busy[r]
        for given in pieces_by_rank[top]:
            kind, weight, _ = given
            # Swapping moves `difference` from the busiest rank to rank r; half the gap is best, so only the
            # two pieces next to weight - gap / 2 can win.
            nearest = bisect_left(pieces_by_rank[r], (kind, weight - gap // 2, 0))
            for taken in pieces_by_rank[r][max(0, nearest - 1) : nearest + 1]:
                difference = weight - taken[1]
                if taken[0] == kind and 0 < difference < gap:
                    swap = _Swap(max(busy[top] - difference, busy[r] + difference), r, given, taken)
                    best = swap if best is None or swap < best else best
    return best
