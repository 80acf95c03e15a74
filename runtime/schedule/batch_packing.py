"""Packs samples of one input pattern into micro-batches and assigns these to replicas so that all end
together.

Samples are sorted by size and a micro-batch is a run of neighbours, so its samples are similar. Dynamic
programming over the ends of runs finds the cut with the least predicted time (padding, and the fixed cost of
each micro-batch); among equals, fewer and more even micro-batches. A micro-batch of several samples must fit
into memory and into the section's token budget. Large micro-batches are few and may leave replicas
unbalanced, so several limits on their size are tried. A further attempt assigns single samples first and
packs each replica's samples afterwards, which balances best where little is padded. Either way replicas then
swap micro-batches of one pattern until they are balanced, because a micro-batch does not take the sum of its
samples' times. The attempt with the shortest longest replica wins.

If memory keeps large neighbours apart, a replica's samples are also packed with large and small ones
alternating, which makes fewer micro-batches.

Subgroups of a replica's ranks may compute different samples of a micro-batch
(`secc.runtime.plan.dealt_samples`). Such micro-batches are runs, too: neighbours take similar time. If they
have more samples than the replica has ranks, only multiples of the number of ranks are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest

from secc.runtime.plan.expr_eval import SizeColumns, evaluate_expr_columns
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Section
from secc.runtime.plan.step_program import replicas_in_lockstep, runs_in_lockstep
from secc.runtime.schedule.dealt_runs import INFEASIBLE_NS, DealtRuns, find_equal_orders
from secc.runtime.schedule.load_balance import (
    Ranks,
    assign_in_rounds,
    assign_least_loaded,
    swap_until_balanced,
)

SamplePositions = tuple[int, ...]  # the samples of a micro-batch, as positions in the global batch
AssignedMicroBatches = list[tuple[int, SamplePositions]]  # a section's micro-batches: (replica, samples)


def exceeds_limits(
    costs: PredictedCosts, stages: Sequence[Section], columns: SizeColumns, count: int
) -> list[bool]:
    """Returns for each micro-batch (columns of symbol values) whether it has more tokens than the section
    allows, or a stage cannot hold as many of its kind as 1F1B needs.

    Stage s of p holds p - s micro-batches between forward and backward, and of one also what a split backward
    keeps between its parts.
    """
    too_large = [False] * count
    if stages[0].micro_batch_tokens:
        too_large = [n > stages[0].micro_batch_tokens for n in costs.token_counts(stages[0], columns, count)]
    for s in (s for s in stages if s.room_bytes):
        held = len(stages) - s.stage
        saved = costs.saved_bytes_of_columns(s, columns, count)
        if s.weight_permille and s.cost.kept_between:
            between = evaluate_expr_columns(s.cost.kept_between, columns, count)
            saved = [own + more // held for own, more in zip(saved, between, strict=True)]
        budget = s.room_bytes // held
        too_large = [already or size > budget for already, size in zip(too_large, saved, strict=True)]
    return too_large


def _too_large(
    costs: PredictedCosts, stages: Sequence[Section], micro_batches: Sequence[SamplePositions]
) -> list[bool]:
    """Returns for each micro-batch whether it exceeds limits (`exceeds_limits`) and cannot be dealt."""
    large = exceeds_limits(costs, stages, costs.micro_batch_columns(micro_batches), len(micro_batches))
    for s in (s for s in stages if s.may_deal):
        large = [
            not parts and (is_large or len(samples) > s.micro_batch)
            for is_large, samples, parts in zip(
                large, micro_batches, costs.deal_samples(s, micro_batches), strict=True
            )
        ]
    return large


def halve_large_micro_batches(
    costs: PredictedCosts, stages: Sequence[Section], cut: AssignedMicroBatches
) -> AssignedMicroBatches:
    """Halves micro-batches of several samples until none of them exceeds the stages' memory or tokens."""
    while any(s.room_bytes or s.micro_batch_tokens or s.may_deal for s in stages):
        large = _too_large(costs, stages, [samples for _, samples in cut])
        if not any(is_large and len(samples) > 1 for is_large, (_, samples) in zip(large, cut, strict=True)):
            break
        cut = [
            (r, part)
            for is_large, (r, samples) in zip(large, cut, strict=True)
            for part in _halve(samples, is_large)
        ]
    return cut


def _halve(samples: SamplePositions, wanted: bool) -> list[SamplePositions]:
    """Returns the two halves of a micro-batch if `wanted` and possible, else the micro-batch itself."""
    half = len(samples) // 2
    return [samples[:half], samples[half:]] if wanted and half else [samples]


def pack_and_assign(
    costs: PredictedCosts,
    stages: Sequence[Section],
    section: Section,
    groups: Sequence[Sequence[int]],
    other_work: Sequence[int],
    ranks: Ranks,
    load: dict[int, int],
) -> list[tuple[SamplePositions, int]]:
    """Packs samples into micro-batches and assigns them to replicas; returns (samples, replica) pairs.

    `groups` are the positions of each pattern's samples, sorted by size. `other_work` is each sample's work
    in other sections on the same ranks. `load` is the ns that each rank does already; the new work is added
    to it. No micro-batch of several samples exceeds the section's tokens, or the memory of one of its
    `stages`.
    """
    times = _run_times(costs, stages, section, groups)
    best = _BestAssignment(groups, other_work, ranks, load, replicas_in_lockstep(section))
    for limit in _size_limits(max(map(len, times), default=1)):
        best.try_packed(
            [
                pair
                for group, run_times in zip(groups, times, strict=True)
                for pair in _pack_optimally(group, run_times[:limit])
            ]
        )
    if not runs_in_lockstep(section):
        single = [
            (run_times[0][i] + other_work[p], p)
            for group, run_times in zip(groups, times, strict=True)
            for i, p in enumerate(group)
        ]
        best.try_assigned(
            _assign_then_pack(
                costs, stages, section, groups, sorted(single, key=lambda x: (-x[0], x[1])), ranks, dict(load)
            )
        )
    load.update(best.load)
    return best.assigned


class _BestAssignment:
    """The best of the attempts so far: the one with the least load on its busiest replica.

    `assigned` has its (samples, replica) pairs, `load` the ns of each rank after it.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        other_work: Sequence[int],
        ranks: Ranks,
        load: dict[int, int],
        in_lockstep: int,
    ) -> None:
        self.group_of_sample = {p: k for k, group in enumerate(groups) for p in group}
        self.other_work, self.ranks, self.initial_load = other_work, ranks, load
        self.in_lockstep = in_lockstep  # replicas that run in rounds
        self.assigned = list[tuple[SamplePositions, int]]()
        self.load = dict(load)
        self.longest_ns = INFEASIBLE_NS

    def try_packed(self, cut: Sequence[tuple[SamplePositions, int]]) -> None:
        """Tries these micro-batches (samples, ns), each assigned to the least loaded replica."""
        weighed = sorted(
            ((self.total_ns(samples, time), samples) for samples, time in cut), key=lambda x: (-x[0], x[1])
        )
        weights, load = [weight for weight, _ in weighed], dict(self.initial_load)
        if self.in_lockstep > 1:
            owner, longest = assign_in_rounds(weights, self.ranks, load, self.in_lockstep)
            self.keep_if_shorter([samples for _, samples in weighed], owner, load, longest)
        else:
            self.balance_and_keep(
                [samples for _, samples in weighed],
                weights,
                assign_least_loaded(weights, self.ranks, load),
                load,
            )

    def try_assigned(self, cut: Sequence[tuple[tuple[SamplePositions, int], int]]) -> None:
        """Tries these micro-batches ((samples, replica), ns)."""
        weights, load = [self.total_ns(samples, time) for (samples, _), time in cut], dict(self.initial_load)
        for ((_, r), _), weight in zip(cut, weights, strict=True):
            load[self.ranks[r]] = load.get(self.ranks[r], 0) + weight
        self.balance_and_keep([samples for (samples, _), _ in cut], weights, [r for (_, r), _ in cut], load)

    def total_ns(self, samples: SamplePositions, time: int) -> int:
        """Returns the work of a micro-batch's samples in all sections on the same ranks."""
        return time + sum(map(self.other_work.__getitem__, samples))

    def balance_and_keep(
        self, micro_batches: list[SamplePositions], weights: list[int], owner: list[int], load: dict[int, int]
    ) -> None:
        # Even perfectly balanced, this attempt would not beat the best one unless its total is lower.
        if sum(load.get(rank, 0) for rank in self.ranks) < self.longest_ns * len(self.ranks):
            swap_until_balanced(
                [self.group_of_sample[samples[0]] for samples in micro_batches],
                weights,
                owner,
                self.ranks,
                load,
            )
            self.keep_if_shorter(micro_batches, owner, load, max(load[rank] for rank in self.ranks))

    def keep_if_shorter(
        self, micro_batches: list[SamplePositions], owner: list[int], load: dict[int, int], longest: int
    ) -> None:
        if longest < self.longest_ns:
            self.assigned = list(zip(micro_batches, owner, strict=True))
            self.load = load
            self.longest_ns = longest


def _assign_then_pack(
    costs: PredictedCosts,
    stages: Sequence[Section],
    section: Section,
    groups: Sequence[Sequence[int]],
    single: Sequence[tuple[int, int]],
    ranks: Ranks,
    load: dict[int, int],
) -> list[tuple[tuple[SamplePositions, int], int]]:
    """Assigns single samples (weight, position) to the least loaded replica, then packs each replica's
    samples.

    Returns ((samples, replica), ns) for each micro-batch.
    """
    owner = dict(
        zip((p for _, p in single), assign_least_loaded((w for w, _ in single), ranks, load), strict=True)
    )
    replica_groups = [
        (r, own)
        for r in range(len(ranks))
        for group in groups
        if (own := [p for p in group if owner[p] == r])
    ]
    packed = pack_replicas(costs, stages, section, [own for _, own in replica_groups])
    return [
        ((samples, r), time)
        for (r, _), runs in zip(replica_groups, packed, strict=True)
        for samples, time in runs
    ]


def pack_replicas(
    costs: PredictedCosts, stages: Sequence[Section], section: Section, groups: Sequence[Sequence[int]]
) -> list[list[tuple[SamplePositions, int]]]:
    """Packs each of several groups of samples, sorted by size; returns (samples, ns) pairs of each.

    Neighbours go together, or large and small samples alternate if large neighbours do not fit into memory.
    """
    times = _run_times(costs, stages, section, groups)
    packed = list(map(_pack_optimally, groups, times))
    kept_apart = [i for i, own in enumerate(times) if any(INFEASIBLE_NS in column for column in own)]
    alternating = [_alternate(groups[i]) for i in kept_apart]
    times = _run_times(costs, stages, section, alternating)
    for i, mixed in zip(kept_apart, map(_pack_optimally, alternating, times), strict=True):
        packed[i] = min(packed[i], mixed, key=lambda cut: sum(time for _, time in cut))
    return packed


def _alternate(samples: Sequence[int]) -> list[int]:
    """Returns sorted samples as the largest, the smallest, the largest of the others, and so on."""
    half = len(samples) // 2
    pairs = zip_longest(samples[: len(samples) - half], samples[len(samples) - half :][::-1])
    return [p for pair in pairs for p in pair if p is not None]


def _size_limits(most: int) -> list[int]:
    """Returns the limits on a micro-batch's size to try: `most`, 3/4 of it, 1/2 of it, ... down to 1."""
    limits, limit = {most, 1}, most
    while limit > 1:
        limits |= {limit, max(1, limit * 3 // 4)}
        limit //= 2
    return sorted(limits, reverse=True)


def _run_times(
    costs: PredictedCosts, stages: Sequence[Section], section: Section, groups: Sequence[Sequence[int]]
) -> list[list[list[int]]]:
    """Returns for each group times[k - 1][i]: forward plus backward ns of the k neighbours from index i on;
    INFEASIBLE_NS if several samples exceed memory or tokens. The list of a group stops at the longest runs
    that fit somewhere.

    All groups are priced as one column: some have few samples, and an expression takes as long for many.
    """
    if section.may_deal:
        return _dealt_run_times(costs, stages, section, groups)
    joined = [p for group in groups for p in group]
    starts = list(accumulate(map(len, groups), initial=0))
    alone = _sample_times(costs, section, joined)
    times = [[alone[start : start + len(own)]] for start, own in zip(starts, groups, strict=False)]
    columns = single = {name: [column[p] for p in joined] for name, column in costs.sample_columns.items()}
    growing = list(range(len(groups)))
    for length in range(2, section.micro_batch + 1):
        growing = [i for i in growing if len(groups[i]) >= length]
        if not growing:
            break
        columns = costs.join_columns(columns, {name: column[length - 1 :] for name, column in single.items()})
        count = len(joined) - length + 1
        forward, backward = costs.times_of_columns(section, columns, count)
        ns = [
            INFEASIBLE_NS if large else f + b
            for f, b, large in zip(
                forward, backward, exceeds_limits(costs, stages, columns, count), strict=True
            )
        ]
        own_ns = {i: ns[starts[i] : starts[i] + len(groups[i]) - length + 1] for i in growing}
        growing = [i for i in growing if min(own_ns[i]) < INFEASIBLE_NS]
        for i in growing:
            times[i].append(own_ns[i])
    return times


def _sample_times(costs: PredictedCosts, section: Section, group: Sequence[int]) -> list[int]:
    """Returns forward plus backward ns of each sample alone."""
    forward, backward = costs.sample_times(section)
    return [forward[p] + backward[p] for p in group]


def _dealt_run_times(
    costs: PredictedCosts, stages: Sequence[Section], section: Section, groups: Sequence[Sequence[int]]
) -> list[list[list[int]]]:
    """Returns `_run_times` of a section that may deal its micro-batches."""
    found: list[list[list[int]]] = [[] for _ in groups]
    for together in find_equal_orders(costs, section, groups):
        times = _price_dealt_runs(costs, stages, section, [groups[i] for i in together])
        for i, own in zip(together, times, strict=True):
            found[i] = own
    return found


def _price_dealt_runs(
    costs: PredictedCosts, stages: Sequence[Section], section: Section, groups: Sequence[Sequence[int]]
) -> list[list[list[int]]]:
    """Returns `_dealt_run_times` of groups that have their samples in one order, the longest one first."""
    most, at_once = min(section.most_samples, len(groups[0])), max(section.mesh.cp, section.micro_batch)
    lengths = [n for n in range(1, most + 1) if n <= at_once or n % section.mesh.cp == 0]
    runs = DealtRuns(costs, section, groups, lengths)
    times: list[list[list[int]]] = [[] for _ in groups]
    longest, growing = [0] * len(groups), list(range(len(groups)))
    for length in lengths:
        growing = [i for i in growing if len(groups[i]) >= length]
        if not growing:
            break
        count = len(runs.group) - length + 1
        divided = [INFEASIBLE_NS] * count
        if length == 1:
            divided = _sample_times(costs, section, runs.group)
        elif length <= section.micro_batch:
            columns = runs.run_columns(length)
            divided = list(map(int.__add__, *costs.times_of_columns(section, columns, count)))
            large = exceeds_limits(costs, stages, columns, count)
            divided = [INFEASIBLE_NS if no else ns for ns, no in zip(divided, large, strict=True)]
        ns = [
            undealt if dealt >= INFEASIBLE_NS else dealt
            for undealt, dealt in zip(divided, runs.run_times(length), strict=True)
        ]
        own_ns, still_growing = runs.of_groups(ns, length), list[int]()
        for i in growing:
            fits = min(own_ns[i]) < INFEASIBLE_NS
            if fits or length < section.mesh.cp:
                skipped = range(len(times[i]) + 1, length)
                times[i] += [[INFEASIBLE_NS] * (len(groups[i]) - n + 1) for n in skipped]
                times[i].append(own_ns[i])
                longest[i] = length if fits else longest[i]
                still_growing.append(i)
        growing = still_growing
    return [own[:end] for own, end in zip(times, longest, strict=True)]


def _pack_optimally(
    group: Sequence[int], times: Sequence[Sequence[int]]
) -> list[tuple[SamplePositions, int]]:
    """Returns (samples, ns) of the best cut of a sorted group into runs of at most `len(times)` samples."""
    # best[e] = (ns, micro-batches, sum of squared sizes) of the best cut of the first e samples, and
    # last_size[e] the size of its last run. Comparing these tuples prefers less time, then fewer, then more
    # even micro-batches.
    best, last_size = [(0, 0, 0)], [0]
    for end in range(1, len(group) + 1):
        t, count, squares = best[end - 1]
        least, chosen = (t + times[0][end - 1], count + 1, squares + 1), 1
        for size in range(2, min(len(times), end) + 1):
            t, count, squares = best[end - size]
            ns = t + times[size - 1][end - size]
            if ns <= least[0] and (value := (ns, count + 1, squares + size * size)) < least:
                least, chosen = value, size
        best.append(least)
        last_size.append(chosen)
    runs: list[tuple[SamplePositions, int]] = []
    end = len(group)
    while end:
        size = last_size[end]
        runs.append((tuple(group[end - size : end]), times[size - 1][end - size]))
        end -= size
    return runs[::-1]
