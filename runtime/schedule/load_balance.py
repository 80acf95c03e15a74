"""Dealing work to ranks: each piece in turn to the least loaded, or to each rank one of every round; and
levelling what was dealt."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Ranks = tuple[int, ...]
WorkPiece = tuple[int, int, int]  # kind, weight, index

BALANCE_TOLERANCE_DIVISOR = (
    500  # ranks are level where the busiest has no more than the mean, but for one part in so many
)
SWAP_PARTNERS = 4  # the least busy ranks, with which the busiest swaps if it can
SWAPS_PER_RANK = 2  # at most, for each rank


def assign_least_loaded(weights: Iterable[int], ranks: Ranks, load: dict[int, int]) -> list[int]:
    """The index into `ranks` for each weight. `load` is what each rank does already; this work is added to
    it.

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


def assign_in_rounds(weights: Sequence[int], ranks: Ranks, load: dict[int, int]) -> list[int]:
    """`balance` for ranks that work in rounds, in which all wait for the longest piece: of as many neighbours
    as there are ranks each rank gets one, so that pieces ordered by weight have alike ones in their round."""
    owner: list[int] = []
    for first in range(0, len(weights), len(ranks)):
        least = sorted(range(len(ranks)), key=lambda r: load.get(ranks[r], 0))
        for weight, r in zip(weights[first : first + len(ranks)], least, strict=False):
            load[ranks[r]] = load.get(ranks[r], 0) + weight
            owner.append(r)
    return owner


def swap_until_balanced(
    kinds: Sequence[int], weights: Sequence[int], owner: list[int], ranks: Ranks, load: dict[int, int]
) -> None:
    """Swaps pieces of one kind between the busiest rank and others as long as that makes it less busy.
    Changes `owner`, the index into `ranks` for each piece, and `load`."""
    held: list[list[WorkPiece]] = [[] for _ in ranks]
    for piece in sorted(zip(kinds, weights, range(len(owner)), strict=True)):
        held[owner[piece[2]]].append(piece)
    busy = [load.get(rank, 0) for rank in ranks]
    enough = sum(busy) // len(busy) * (BALANCE_TOLERANCE_DIVISOR + 1) // BALANCE_TOLERANCE_DIVISOR
    for _ in range(SWAPS_PER_RANK * len(ranks)):
        *others, top = sorted(range(len(ranks)), key=busy.__getitem__)
        if busy[top] <= enough:
            break
        swap = _find_best_swap(held, busy, top, others[:SWAP_PARTNERS]) or _find_best_swap(
            held, busy, top, others[SWAP_PARTNERS:]
        )
        if swap is None:
            break
        for giver, taker, piece in ((top, swap.other, swap.given), (swap.other, top, swap.taken)):
            held[giver].remove(piece)
            insort(held[taker], piece)
            busy[giver], busy[taker], owner[piece[2]] = busy[giver] - piece[1], busy[taker] + piece[1], taker
    load |= zip(ranks, busy, strict=True)


class _Swap(NamedTuple):
    """What a rank gives to another one and takes from it, after which the busier of the two is `busier`."""

    busier_load: int
    other: int
    given: WorkPiece
    taken: WorkPiece


def _find_best_swap(
    held: Sequence[Sequence[WorkPiece]], busy: Sequence[int], top: int, others: Iterable[int]
) -> _Swap | None:
    """The swap of `top` with one of the others that helps most, if one does. Pieces are ordered by kind and
    weight."""
    best: _Swap | None = None
    for r in others:
        gap = busy[top] - busy[r]
        for given in held[top]:
            kind, weight, _ = given
            at = bisect_left(held[r], (kind, weight - gap // 2, 0))
            for taken in held[r][max(0, at - 1) : at + 1]:
                less = weight - taken[1]
                if taken[0] == kind and 0 < less < gap:
                    found = _Swap(max(busy[top] - less, busy[r] + less), r, given, taken)
                    best = found if best is None or found < best else best
    return best
