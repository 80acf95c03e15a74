"""Prices all runs of neighbours in a sorted group of samples as micro-batches that are dealt to subgroups of
the ranks of cp, as `PredictedCosts.price_dealt` prices one micro-batch, but many runs at once.

Runs of one length are dealt alike where samples are sorted by time, or alternate between the longest and the
shortest that are left: part k of every run has its samples at the same distances from the run's first one. So
the prices of all parts with these distances are evaluated once, as columns, and a run takes the largest of
its parts. The same holds for the runs of several groups, such as the samples of each replica, if these have
their samples in one order; a column then has them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from secc.runtime.plan.expr_eval import SizeColumns, evaluate_expr_tensor
from secc.runtime.plan.int_columns import int_tensor
from secc.runtime.plan.predicted_costs import PredictedCosts, deal_in_turns
from secc.runtime.plan.schema import Section, SubgroupCost
from secc.runtime.plan.step_program import owes_backward

INFEASIBLE_NS = 1 << 62  # time of a run of samples that does not fit into memory

LENGTHS_AT_ONCE = 8  # lengths of runs for which parts are priced together

TimeColumns = tuple[list[int], list[int]]  # ns of forward and backward


class DealtRuns:
    """The runs of each of `groups`, positions of samples, as micro-batches of a section that may deal them;
    of the `lengths`, in ascending order, that will be asked for.

    Several groups are of one order (`find_equal_orders`), and the first one is the longest. In columns they
    lie one behind the other (`group`), each from an even place on, since some orders repeat after two places;
    what stands there for a run across the border of two groups has no meaning.
    """

    def __init__(
        self,
        costs: PredictedCosts,
        section: Section,
        groups: Sequence[Sequence[int]],
        lengths: Sequence[int],
    ) -> None:
        self.costs, self.section, self.groups, self.lengths = costs, section, groups, lengths
        self.group, self.starts = list[int](), list[int]()
        for own in groups:
            self.group += self.group[-1:] * (len(self.group) % 2)
            self.starts.append(len(self.group))
            self.group += own
        group = self.group
        self.single = {name: [column[p] for p in group] for name, column in costs.sample_columns.items()}
        self._tensors = {name: int_tensor(column) for name, column in self.single.items()}
        self._joined: tuple[int, SizeColumns] = 1, self.single  # the columns of the runs of one length
        self.stages = costs.stages_of(section)
        self.at = [s.name for s in self.stages].index(section.name)
        orders = _orders(costs, section, groups[0])
        self.kinds = [_SubgroupRuns(self, k, order.period) for k, order in enumerate(orders)]

    def of_groups(self, column: list[int], length: int) -> list[list[int]]:
        """Returns for each group the part of a column about runs of `length` samples."""
        return [
            column[start : start + max(0, len(own) - length + 1)]
            for start, own in zip(self.starts, self.groups, strict=True)
        ]

    def run_times(self, length: int) -> list[int]:
        """Returns the ns of each run of `length` samples, INFEASIBLE_NS for one that is not dealt. Lengths
        have to be asked for in ascending order."""
        count = len(self.group) - length + 1
        if any(kind.deals_in_turns(length) and not kind.period for kind in self.kinds):
            runs = [tuple(self.group[i : i + length]) for i in range(count)]
            dealt = self.costs.price_dealt(self.section, runs)
            return [INFEASIBLE_NS if d is None else d.total_ns for d in dealt]
        best, own = [INFEASIBLE_NS] * count, [INFEASIBLE_NS] * count
        for kind in self.kinds:
            if (by_stage := kind.run_times(length)) is None:
                continue
            total = by_stage[0] if len(by_stage) == 1 else list(map(sum, zip(*by_stage, strict=True)))
            own = [
                new if ns < least else old
                for new, ns, least, old in zip(by_stage[self.at], total, best, own, strict=True)
            ]
            best = list(map(min, best, total))
        if 1 < length <= self.section.micro_batch:
            columns = self.run_columns(length)
            divided = [map(int.__add__, *self.costs.times_of_columns(s, columns, count)) for s in self.stages]
            own = [
                ns if least < sum(all_ranks) else INFEASIBLE_NS
                for ns, least, *all_ranks in zip(own, best, *divided, strict=True)
            ]
        return own

    def run_columns(self, length: int) -> SizeColumns:
        """Returns the symbol values of the runs of `length` samples, lengths in ascending order."""
        for last in range(self._joined[0], length):
            following = {name: column[last:] for name, column in self.single.items()}
            self._joined = last + 1, self.costs.join_columns(self._joined[1], following)
        return self._joined[1]

    def join_parts(self, parts: Sequence[tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Returns the symbol values of parts with a sample at each of these distances from their first one,
        the first distance being 0: by place of the first one in the group, one part behind the other."""
        count, joined = len(self.group), dict[str, torch.Tensor]()
        places = [int_tensor(part)[:, None] + torch.arange(count - part[-1]) for part in parts]
        for name, column in self._tensors.items():
            values = (column[at] for at in places)
            is_sum = self.costs.is_sum(name)
            joined[name] = torch.cat([v.sum(0) if is_sum else v.amax(0) for v in values])
        return joined


class _SubgroupRuns:
    """Runs that are dealt to the subgroups of one size, the `index`-th that each stage lists."""

    def __init__(self, runs: DealtRuns, index: int, period: int) -> None:
        self.runs, self.costs, self.period = runs, runs.costs, period
        self.subgroups = [s.subgroups[index] for s in runs.stages]
        self.count = runs.section.mesh.cp // self.subgroups[0].ranks
        self.places = _places(self.costs, runs.stages[0], self.subgroups[0], runs.group)
        self.part_times: dict[tuple[int, ...], list[TimeColumns]] = {}
        # by the length of runs that are dealt in turns, the parts of a run from each of the first places
        self.parts: dict[int, list[list[list[int]]]] = {}
        # by stage, what the slowest sample takes of each run of `_length` samples
        self._length, self._slowest = 1, self._price_parts((0,))

    def deals_in_turns(self, length: int) -> bool:
        """Whether some subgroup gets several samples of a run."""
        return self.count < length <= self.runs.section.micro_batch * self.count

    def run_times(self, length: int) -> list[list[int]] | None:
        """Returns the ns of each run by stage, at least INFEASIBLE_NS for one that does not fit; None where
        a run has too few or too many samples."""
        if 1 < length <= self.count:
            slowest = self._slowest_samples(length)
        elif self.deals_in_turns(length):
            slowest = self._slowest_parts(length)
        else:
            return None
        return [list(map(int.__add__, *columns)) for columns in slowest]

    def _slowest_samples(self, length: int) -> list[TimeColumns]:
        for last in range(self._length, length):
            self._slowest = [
                (list(map(max, forward, one[0][last:])), list(map(max, backward, one[1][last:])))
                for (forward, backward), one in zip(self._slowest, self._price_parts((0,)), strict=True)
            ]
        self._length = length
        return self._slowest

    def _slowest_parts(self, length: int) -> list[TimeColumns]:
        runs = len(self.places) - length + 1
        found: list[TimeColumns] = [([0] * runs, [0] * runs) for _ in self.subgroups]
        if length not in self.parts:
            following = [n for n in self.runs.lengths if n >= length and self.deals_in_turns(n)]
            self.parts |= {n: self._deal(n) for n in following[:LENGTHS_AT_ONCE]}
            by_first = [parts for n in following[:LENGTHS_AT_ONCE] for parts in self.parts[n]]
            self._price_new_parts({_distances(part) for parts in by_first for part in parts})
        for first, parts in enumerate(self.parts[length]):
            priced = [self.part_times[_distances(part)] for part in parts]
            for stage, columns in enumerate(found):
                for way, column in enumerate(columns):
                    column[first :: self.period] = map(
                        max,
                        *(
                            times[stage][way][first + part[0] : part[0] + runs : self.period]
                            for part, times in zip(parts, priced, strict=True)
                        ),
                    )
        return found

    def _deal(self, length: int) -> list[list[list[int]]]:
        """Returns the parts of a run of `length` samples from each of the first `period` places, as distances
        from that place."""
        dealt: list[list[list[int]]] = []
        for first in range(min(self.period, len(self.places) - length + 1)):
            order = sorted(range(length), key=self.places[first : first + length].__getitem__)
            dealt.append([sorted(part) for part in deal_in_turns(order, self.count) if part])
        return dealt

    def _price_parts(self, distances: tuple[int, ...]) -> list[TimeColumns]:
        """Returns the ns of parts with samples at these distances by stage, by the place of the first one;
        forward takes INFEASIBLE_NS where a part does not fit."""
        self._price_new_parts({distances})
        return self.part_times[distances]

    def _price_new_parts(self, asked: Iterable[tuple[int, ...]]) -> None:
        """Prices parts at these distances that were not priced before, all of them as one set of columns:
        a group on one replica has few samples, and each evaluation takes as long as many rows."""
        stages = list(zip(self.runs.stages, self.subgroups, strict=True))
        new = sorted(own for own in asked if own not in self.part_times)
        for own in new:
            if len(own) == 1:
                self.part_times[own] = [self._price_samples(*stage) for stage in stages]
        if not (several := [own for own in new if len(own) > 1]):
            return
        counts = [len(self.places) - own[-1] for own in several]
        joined = self.runs.join_parts(several)
        priced = [self._price_columns(*stage, joined, sum(counts)) for stage in stages]
        for own, end, count in zip(several, accumulate(counts), counts, strict=True):
            self.part_times[own] = [
                (forward[end - count : end], backward[end - count : end]) for forward, backward in priced
            ]

    def _price_samples(self, stage: Section, subgroup: SubgroupCost) -> TimeColumns:
        """`_price_columns` of the group's samples alone."""
        forward, backward = self.costs.sample_times(replace(stage, cost=subgroup.cost))
        saved, group = self.costs.saved_bytes_of_samples(subgroup.cost), self.runs.group
        return [forward[p] if saved[p] <= stage.subgroup_bytes else INFEASIBLE_NS for p in group], [
            backward[p] for p in group
        ]

    def _price_columns(
        self, stage: Section, subgroup: SubgroupCost, columns: Mapping[str, torch.Tensor], count: int
    ) -> TimeColumns:
        """Returns the ns of `count` parts of several samples."""

        def evaluate(text: str) -> torch.Tensor:
            return evaluate_expr_tensor(text, columns, count, INFEASIBLE_NS)

        cost = subgroup.cost
        too_large = evaluate(cost.saved or "0") > stage.subgroup_bytes
        if stage.micro_batch_tokens:
            too_large |= evaluate(stage.token_count) > stage.micro_batch_tokens
        forward = evaluate(cost.forward_ns).masked_fill(too_large, INFEASIBLE_NS)
        return forward.tolist(), evaluate(cost.backward_ns if owes_backward(stage) else "0").tolist()


def _distances(part: Sequence[int]) -> tuple[int, ...]:
    """Returns the distances of a part's samples from its first one."""
    return tuple(d - part[0] for d in part)


class _Order(NamedTuple):
    """In what order of time a group has its samples: after `period` places runs have them in the same order
    again. The period is 1 where samples are sorted, 2 where the longest and the shortest left alternate, 0
    for any other order. The rest tells orders of one period apart."""

    period: int
    even_places_first: bool = True
    even_ascend: bool = True
    odd_ascend: bool = True


def find_equal_orders(
    costs: PredictedCosts, section: Section, groups: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Returns the indices of groups that `DealtRuns` takes together, the longest group first."""
    together: dict[object, list[int]] = {}
    for i, group in enumerate(groups):
        orders = _orders(costs, section, group)
        together.setdefault(orders if all(o.period for o in orders) else i, []).append(i)
    return [sorted(same, key=lambda i: -len(groups[i])) for same in together.values()]


def _orders(costs: PredictedCosts, section: Section, group: Sequence[int]) -> tuple[_Order, ...]:
    """Returns the order of a group by the times of each kind of subgroup."""
    first = costs.stages_of(section)[0]
    return tuple(_find_order(_places(costs, first, kind, group)) for kind in first.subgroups)


def _places(costs: PredictedCosts, stage: Section, subgroup: SubgroupCost, group: Sequence[int]) -> list[int]:
    """Returns the place of each sample of a group among all, by the time of a subgroup's ranks."""
    order = costs.subgroup_prices(stage, subgroup.ranks).order
    return [order[p] for p in group]


def _find_order(places: Sequence[int]) -> _Order:
    for ascends in (True, False):
        if _is_sorted(places if ascends else places[::-1]):
            return _Order(1, even_ascend=ascends)
    even, odd = places[::2], places[1::2]
    even_ascend, odd_ascend = _is_sorted(even), _is_sorted(odd)
    sorted_apart = (even_ascend or _is_sorted(even[::-1])) and (odd_ascend or _is_sorted(odd[::-1]))
    if not sorted_apart or not (max(even) < min(odd) or max(odd) < min(even)):
        return _Order(0)
    return _Order(2, max(even) < min(odd), even_ascend, odd_ascend)


def _is_sorted(places: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(places))
