"""Lots: samples of one pattern cut into micro-batches so that little time is lost, and dealt so that replicas
end together.

Samples are ordered by size, so neighbours are alike, and a lot is a run of neighbours. The cut with the least
modelled time (padding, and what every micro-batch costs besides its samples) is found by dynamic programming
over where lots end; among equals, fewer and more even lots. No lot of several samples keeps more bytes than
there is room for. Large lots are few and may leave replicas uneven, so several limits on the number of
samples are tried, and dealing samples one by one before each replica's are cut, which balances best where
little is padded. Either way replicas then swap lots of one pattern until they are level, because what lots
take is not the sum of what their samples take alone. What makes the longest replica shortest is taken.

Where memory keeps large neighbours apart, a replica's samples are also cut with large and small ones in turn,
which makes fewer lots.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from secc.runtime.plan.expr_eval import SizeColumns
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Section
from secc.runtime.plan.step_program import gathers_parameters
from secc.runtime.schedule.load_balance import (
    Ranks,
    assign_in_rounds,
    assign_least_loaded,
    swap_until_balanced,
)

SamplePositions = tuple[int, ...]
AssignedMicroBatches = list[
    tuple[int, SamplePositions]
]  # a section's micro-batches: (replica, positions of the samples)

INFEASIBLE_NS = 1 << 62  # ns


def exceeds_memory(
    costs: PredictedCosts, stages: Sequence[Section], columns: SizeColumns, count: int
) -> list[bool]:
    """For each micro-batch of the sizes in `columns`: whether a stage has no room for as many like it as it
    must hold."""
    found = [False] * count
    for s in (s for s in stages if s.room_bytes):
        room = s.room_bytes // (len(stages) - s.stage)
        found = [
            large or kept > room
            for large, kept in zip(found, costs.saved_bytes_of_columns(s, columns, count), strict=True)
        ]
    return found


def halve_large_micro_batches(
    costs: PredictedCosts, stages: Sequence[Section], cut: AssignedMicroBatches
) -> AssignedMicroBatches:
    """The cut, with lots of several samples halved until none keeps more than the stages have room for."""
    while any(s.room_bytes for s in stages):
        large = exceeds_memory(costs, stages, costs.micro_batch_columns([lot for _, lot in cut]), len(cut))
        if not any(is_large and len(lot) > 1 for is_large, (_, lot) in zip(large, cut, strict=True)):
            break
        cut = [
            (r, part) for is_large, (r, lot) in zip(large, cut, strict=True) for part in _halve(lot, is_large)
        ]
    return cut


def _halve(lot: SamplePositions, wanted: bool) -> list[SamplePositions]:
    half = len(lot) // 2
    return [lot[:half], lot[half:]] if wanted and half else [lot]


def pack_and_assign(
    costs: PredictedCosts,
    stages: Sequence[Section],
    section: Section,
    groups: Sequence[Sequence[int]],
    others: Sequence[int],
    ranks: Ranks,
    load: dict[int, int],
) -> list[tuple[SamplePositions, int]]:
    """(lot, replica) for all samples of `groups`, each ordered by size. `others` is each sample's work in
    sections on the same ranks.

    `load` is what the ranks do already; this work is added to it. No lot of several samples is too large for
    one of the section's `stages`.
    """
    times = [_run_times(costs, stages, section, group) for group in groups]
    deal = _BestAssignment(groups, others, ranks, load, gathers_parameters(section))
    for limit in _size_limits(section.micro_batch):
        deal.try_packed(
            [
                pair
                for group, table in zip(groups, times, strict=True)
                for pair in _pack_optimally(group, table[:limit])
            ]
        )
    if not gathers_parameters(section):
        single = [
            (table[0][i] + others[p], p)
            for group, table in zip(groups, times, strict=True)
            for i, p in enumerate(group)
        ]
        deal.try_assigned(
            _assign_then_pack(
                costs, stages, section, groups, sorted(single, key=lambda x: (-x[0], x[1])), ranks, dict(load)
            )
        )
    load.update(deal.load)
    return deal.assigned


class _BestAssignment:
    """The best of several ways to cut and deal, by its longest replica: `found` has (lot, replica), `load`
    what ranks then do."""

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        others: Sequence[int],
        ranks: Ranks,
        load: dict[int, int],
        in_rounds: bool,
    ) -> None:
        self.group_of_sample = {p: k for k, group in enumerate(groups) for p in group}
        self.other_work, self.ranks, self.initial_load, self.in_rounds = others, ranks, load, in_rounds
        self.assigned, self.load, self.longest_ns = (
            list[tuple[SamplePositions, int]](),
            dict(load),
            INFEASIBLE_NS,
        )

    def try_packed(self, cut: Sequence[tuple[SamplePositions, int]]) -> None:
        """Try these lots (lot, time), each given to the least loaded replica."""
        weighed = sorted(((self.total_ns(lot, time), lot) for lot, time in cut), key=lambda x: (-x[0], x[1]))
        weights, after = [w for w, _ in weighed], dict(self.initial_load)
        if self.in_rounds:
            owner = assign_in_rounds(weights, self.ranks, after)
            self.keep_if_shorter([lot for _, lot in weighed], owner, after, sum(weights[:: len(self.ranks)]))
        else:
            self.balance_and_keep(
                [lot for _, lot in weighed], weights, assign_least_loaded(weights, self.ranks, after), after
            )

    def try_assigned(self, cut: Sequence[tuple[tuple[SamplePositions, int], int]]) -> None:
        """Try these lots ((lot, replica), time)."""
        weights, after = [self.total_ns(lot, time) for (lot, _), time in cut], dict(self.initial_load)
        for ((_, r), _), weight in zip(cut, weights, strict=True):
            after[self.ranks[r]] = after.get(self.ranks[r], 0) + weight
        self.balance_and_keep([lot for (lot, _), _ in cut], weights, [r for (_, r), _ in cut], after)

    def total_ns(self, lot: SamplePositions, time: int) -> int:
        """What a lot takes in all sections on the same ranks."""
        return time + sum(map(self.other_work.__getitem__, lot))

    def balance_and_keep(
        self, lots: list[SamplePositions], weights: list[int], owner: list[int], after: dict[int, int]
    ) -> None:
        if sum(after.get(rank, 0) for rank in self.ranks) < self.longest_ns * len(self.ranks):
            swap_until_balanced(
                [self.group_of_sample[lot[0]] for lot in lots], weights, owner, self.ranks, after
            )
            self.keep_if_shorter(lots, owner, after, max(after[rank] for rank in self.ranks))

    def keep_if_shorter(
        self, lots: list[SamplePositions], owner: list[int], after: dict[int, int], longest: int
    ) -> None:
        if longest < self.longest_ns:
            self.assigned, self.load, self.longest_ns = list(zip(lots, owner, strict=True)), after, longest


def _assign_then_pack(
    costs: PredictedCosts,
    stages: Sequence[Section],
    section: Section,
    groups: Sequence[Sequence[int]],
    single: Sequence[tuple[int, int]],
    ranks: Ranks,
    load: dict[int, int],
) -> list[tuple[tuple[SamplePositions, int], int]]:
    """((lot, replica), time): `single` (weight, sample) dealt one by one to the least loaded, and what each
    replica got cut by itself."""
    owner = dict(
        zip((p for _, p in single), assign_least_loaded((w for w, _ in single), ranks, load), strict=True)
    )
    found: list[tuple[tuple[SamplePositions, int], int]] = []
    for r in range(len(ranks)):
        for group in groups:
            own = [p for p in group if owner[p] == r]
            found += [
                ((lot, r), time) for lot, time in (_pack_replica(costs, stages, section, own) if own else ())
            ]
    return found


def _pack_replica(
    costs: PredictedCosts, stages: Sequence[Section], section: Section, own: Sequence[int]
) -> list[tuple[SamplePositions, int]]:
    """(lot, time) of samples ordered by size: neighbours together, or large and small ones in turn where
    large neighbours have no room."""
    times = _run_times(costs, stages, section, own)
    found = _pack_optimally(own, times)
    if any(INFEASIBLE_NS in column for column in times):
        half = len(own) // 2
        in_turn = [
            p
            for pair in zip_longest(own[: len(own) - half], own[len(own) - half :][::-1])
            for p in pair
            if p is not None
        ]
        other = _pack_optimally(in_turn, _run_times(costs, stages, section, in_turn))
        found = min(found, other, key=lambda cut: sum(time for _, time in cut))
    return found


def _size_limits(most: int) -> list[int]:
    """`most`, three quarters of it, half of it, ... down to 1."""
    found, limit = {most, 1}, most
    while limit > 1:
        found |= {limit, max(1, limit * 3 // 4)}
        limit //= 2
    return sorted(found, reverse=True)


def _run_times(
    costs: PredictedCosts, stages: Sequence[Section], section: Section, group: Sequence[int]
) -> list[list[int]]:
    """For 1, 2, ... samples: the time of that many neighbours from each place on, forward and backward
    together; for ever where several are too large."""
    first = {name: [column[p] for p in group] for name, column in costs.sample_columns.items()}
    columns, found = first, list[list[int]]()
    for together in range(1, min(section.micro_batch, len(group)) + 1):
        if together > 1:
            columns = costs.join_columns(
                columns, {name: column[together - 1 :] for name, column in first.items()}
            )
        count = len(group) - together + 1
        forward, backward = costs.times_of_columns(section, columns, count)
        times = list(map(int.__add__, forward, backward))
        if together > 1:
            times = [
                INFEASIBLE_NS if large else t
                for t, large in zip(times, exceeds_memory(costs, stages, columns, count), strict=True)
            ]
        found.append(times)
    return found


def _pack_optimally(
    group: Sequence[int], times: Sequence[Sequence[int]]
) -> list[tuple[SamplePositions, int]]:
    """(lot, time) of the best cut of an ordered group into runs of at most `len(times)` samples."""
    best, last = [(0, 0, 0)], [0]
    for end in range(1, len(group) + 1):
        value, size = min(
            ((t + times[size - 1][end - size], count + 1, squares + size * size), size)
            for size in range(1, min(len(times), end) + 1)
            for t, count, squares in (best[end - size],)
        )
        best.append(value)
        last.append(size)
    found: list[tuple[SamplePositions, int]] = []
    end = len(group)
    while end:
        size = last[end]
        found.append((tuple(group[end - size : end]), times[size - 1][end - size]))
        end -= size
    return found[::-1]
