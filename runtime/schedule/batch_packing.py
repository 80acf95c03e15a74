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

from secc.runtime.plan.expr_eval import Columns
from secc.runtime.plan.predicted_costs import Costs
from secc.runtime.plan.schema import Section
from secc.runtime.plan.step_program import gathers
from secc.runtime.schedule.load_balance import Ranks, balance, balance_rounds, level

Lot = tuple[int, ...]
Cut = list[tuple[int, Lot]]  # a section's micro-batches: (replica, positions of the samples)

FOR_EVER = 1 << 62  # ns


def too_large(costs: Costs, stages: Sequence[Section], columns: Columns, count: int) -> list[bool]:
    """For each micro-batch of the sizes in `columns`: whether a stage has no room for as many like it as it
    must hold."""
    found = [False] * count
    for s in (s for s in stages if s.room_bytes):
        room = s.room_bytes // (len(stages) - s.stage)
        found = [
            large or kept > room for large, kept in zip(found, costs.kept_at(s, columns, count), strict=True)
        ]
    return found


def halved(costs: Costs, stages: Sequence[Section], cut: Cut) -> Cut:
    """The cut, with lots of several samples halved until none keeps more than the stages have room for."""
    while any(s.room_bytes for s in stages):
        large = too_large(costs, stages, costs.columns_of([lot for _, lot in cut]), len(cut))
        if not any(is_large and len(lot) > 1 for is_large, (_, lot) in zip(large, cut, strict=True)):
            break
        cut = [
            (r, part)
            for is_large, (r, lot) in zip(large, cut, strict=True)
            for part in _halves(lot, is_large)
        ]
    return cut


def _halves(lot: Lot, wanted: bool) -> list[Lot]:
    half = len(lot) // 2
    return [lot[:half], lot[half:]] if wanted and half else [lot]


def lots(
    costs: Costs,
    stages: Sequence[Section],
    section: Section,
    groups: Sequence[Sequence[int]],
    others: Sequence[int],
    ranks: Ranks,
    load: dict[int, int],
) -> list[tuple[Lot, int]]:
    """(lot, replica) for all samples of `groups`, each ordered by size. `others` is each sample's work in
    sections on the same ranks.

    `load` is what the ranks do already; this work is added to it. No lot of several samples is too large for
    one of the section's `stages`.
    """
    times = [_times(costs, stages, section, group) for group in groups]
    deal = _Deal(groups, others, ranks, load, gathers(section))
    for limit in _limits(section.micro_batch):
        deal.whole(
            [pair for group, table in zip(groups, times, strict=True) for pair in _cut(group, table[:limit])]
        )
    if not gathers(section):
        single = [
            (table[0][i] + others[p], p)
            for group, table in zip(groups, times, strict=True)
            for i, p in enumerate(group)
        ]
        deal.dealt(
            _each_cut(
                costs, stages, section, groups, sorted(single, key=lambda x: (-x[0], x[1])), ranks, dict(load)
            )
        )
    load.update(deal.load)
    return deal.found


class _Deal:
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
        self.group = {p: k for k, group in enumerate(groups) for p in group}
        self.others, self.ranks, self.before, self.in_rounds = others, ranks, load, in_rounds
        self.found, self.load, self.longest = list[tuple[Lot, int]](), dict(load), FOR_EVER

    def whole(self, cut: Sequence[tuple[Lot, int]]) -> None:
        """Try these lots (lot, time), each given to the least loaded replica."""
        weighed = sorted(((self.weight(lot, time), lot) for lot, time in cut), key=lambda x: (-x[0], x[1]))
        weights, after = [w for w, _ in weighed], dict(self.before)
        if self.in_rounds:
            owner = balance_rounds(weights, self.ranks, after)
            self.keep([lot for _, lot in weighed], owner, after, sum(weights[:: len(self.ranks)]))
        else:
            self.levelled([lot for _, lot in weighed], weights, balance(weights, self.ranks, after), after)

    def dealt(self, cut: Sequence[tuple[tuple[Lot, int], int]]) -> None:
        """Try these lots ((lot, replica), time)."""
        weights, after = [self.weight(lot, time) for (lot, _), time in cut], dict(self.before)
        for ((_, r), _), weight in zip(cut, weights, strict=True):
            after[self.ranks[r]] = after.get(self.ranks[r], 0) + weight
        self.levelled([lot for (lot, _), _ in cut], weights, [r for (_, r), _ in cut], after)

    def weight(self, lot: Lot, time: int) -> int:
        """What a lot takes in all sections on the same ranks."""
        return time + sum(map(self.others.__getitem__, lot))

    def levelled(self, lots: list[Lot], weights: list[int], owner: list[int], after: dict[int, int]) -> None:
        if sum(after.get(rank, 0) for rank in self.ranks) < self.longest * len(self.ranks):
            level([self.group[lot[0]] for lot in lots], weights, owner, self.ranks, after)
            self.keep(lots, owner, after, max(after[rank] for rank in self.ranks))

    def keep(self, lots: list[Lot], owner: list[int], after: dict[int, int], longest: int) -> None:
        if longest < self.longest:
            self.found, self.load, self.longest = list(zip(lots, owner, strict=True)), after, longest


def _each_cut(
    costs: Costs,
    stages: Sequence[Section],
    section: Section,
    groups: Sequence[Sequence[int]],
    single: Sequence[tuple[int, int]],
    ranks: Ranks,
    load: dict[int, int],
) -> list[tuple[tuple[Lot, int], int]]:
    """((lot, replica), time): `single` (weight, sample) dealt one by one to the least loaded, and what each
    replica got cut by itself."""
    owner = dict(zip((p for _, p in single), balance((w for w, _ in single), ranks, load), strict=True))
    found: list[tuple[tuple[Lot, int], int]] = []
    for r in range(len(ranks)):
        for group in groups:
            own = [p for p in group if owner[p] == r]
            found += [
                ((lot, r), time) for lot, time in (_best_cut(costs, stages, section, own) if own else ())
            ]
    return found


def _best_cut(
    costs: Costs, stages: Sequence[Section], section: Section, own: Sequence[int]
) -> list[tuple[Lot, int]]:
    """(lot, time) of samples ordered by size: neighbours together, or large and small ones in turn where
    large neighbours have no room."""
    times = _times(costs, stages, section, own)
    found = _cut(own, times)
    if any(FOR_EVER in column for column in times):
        half = len(own) // 2
        in_turn = [
            p
            for pair in zip_longest(own[: len(own) - half], own[len(own) - half :][::-1])
            for p in pair
            if p is not None
        ]
        other = _cut(in_turn, _times(costs, stages, section, in_turn))
        found = min(found, other, key=lambda cut: sum(time for _, time in cut))
    return found


def _limits(most: int) -> list[int]:
    """`most`, three quarters of it, half of it, ... down to 1."""
    found, limit = {most, 1}, most
    while limit > 1:
        found |= {limit, max(1, limit * 3 // 4)}
        limit //= 2
    return sorted(found, reverse=True)


def _times(
    costs: Costs, stages: Sequence[Section], section: Section, group: Sequence[int]
) -> list[list[int]]:
    """For 1, 2, ... samples: the time of that many neighbours from each place on, forward and backward
    together; for ever where several are too large."""
    first = {name: [column[p] for p in group] for name, column in costs.columns.items()}
    columns, found = first, list[list[int]]()
    for together in range(1, min(section.micro_batch, len(group)) + 1):
        if together > 1:
            columns = costs.joined(columns, {name: column[together - 1 :] for name, column in first.items()})
        count = len(group) - together + 1
        forward, backward = costs.at(section, columns, count)
        times = list(map(int.__add__, forward, backward))
        if together > 1:
            times = [
                FOR_EVER if large else t
                for t, large in zip(times, too_large(costs, stages, columns, count), strict=True)
            ]
        found.append(times)
    return found


def _cut(group: Sequence[int], times: Sequence[Sequence[int]]) -> list[tuple[Lot, int]]:
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
    found: list[tuple[Lot, int]] = []
    end = len(group)
    while end:
        size = last[end]
        found.append((tuple(group[end - size : end]), times[size - 1][end - size]))
        end -= size
    return found[::-1]
