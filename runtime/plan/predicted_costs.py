"""Predicted times and saved bytes of samples and micro-batches: the plan's cost expressions at their sizes.

All times are integer nanoseconds, so that every rank decides the same on any CPU. Thousands of samples are
evaluated as columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

from secc.runtime.plan.batch_sizes import combine_sizes, pad_sample_sizes
from secc.runtime.plan.expr_eval import SizeColumns, evaluate_expr_columns
from secc.runtime.plan.schema import Cost, Plan, Section, SubgroupCost
from secc.runtime.plan.step_program import SampleMeta, owes_backward

SampleParts = tuple[tuple[int, ...], ...]  # sample positions of each subgroup of the ranks of cp, ascending
# By an expression and a number of equal samples: its values for as many of each sample in a micro-batch.
KnownSampleValues = dict[tuple[str, int], list[int]]


class PartCosts(NamedTuple):
    """What a part of a micro-batch's samples takes in ns and keeps in bytes, and whether its ranks have
    memory for it."""

    forward_ns: int
    backward_ns: int
    saved_bytes: int
    is_possible: bool


class SplitBackwards(NamedTuple):
    """The bytes that micro-batches keep in addition between the parts of their split backwards, () for none,
    and the indices of those that run their backward whole, because that would be too much."""

    between_bytes: Sequence[int] = ()
    whole: frozenset[int] = frozenset()


@dataclass(frozen=True)
class DealtCosts:
    """A micro-batch dealt to equal `subgroups` of the ranks of cp, each of `ranks` ranks: ns and bytes of the
    largest part."""

    subgroups: int
    ranks: int
    forward_ns: int
    backward_ns: int
    saved_bytes: int

    @property
    def total_ns(self) -> int:
        """Forward and backward."""
        return self.forward_ns + self.backward_ns


class SubgroupPrices:
    """What the ranks of one kind of subgroup take for single samples, columns by sample, and for the larger
    parts that were priced so far. `order` has the place of each sample among all, the longest first."""

    def __init__(self, forward: list[int], backward: list[int], saved: list[int], most_bytes: int) -> None:
        self.forward, self.backward, self.saved = forward, backward, saved
        self.is_possible = [size <= most_bytes for size in saved]
        ns = list(map(int.__add__, forward, backward))
        self.order = [0] * len(ns)
        for place, p in enumerate(sorted(range(len(ns)), key=lambda p: (-ns[p], p))):
            self.order[p] = place
        self.parts: dict[tuple[int, ...], PartCosts] = {}
        self._largest: dict[tuple[int, ...], tuple[int, int, int] | None] = {}

    def largest_of(self, samples: tuple[int, ...]) -> tuple[int, int, int] | None:
        """Returns the most that one of the samples, each a part of its own, takes: ns of forward, ns of
        backward, saved bytes. None if one of them does not fit. Runs of neighbours are priced by growing
        length, so a run without its last sample is mostly known."""
        if samples not in self._largest:
            last, before = samples[-1], samples[:-1]
            own = (self.forward[last], self.backward[last], self.saved[last])
            found = own if self.is_possible[last] else None
            if before and found is not None:
                known = self._largest[before] if before in self._largest else self._largest_of_all(before)
                found = None if known is None else _larger(known, own)
            self._largest[samples] = found
        return self._largest[samples]

    def _largest_of_all(self, samples: tuple[int, ...]) -> tuple[int, int, int] | None:
        if not all(map(self.is_possible.__getitem__, samples)):
            return None
        forward, backward, saved = (
            max(map(column.__getitem__, samples)) for column in (self.forward, self.backward, self.saved)
        )
        return forward, backward, saved

    def deal_in_turns(self, samples: Sequence[int], subgroups: int) -> SampleParts:
        """Deals samples to subgroups, those that take longest first, in turns forth and back."""
        if len(samples) <= subgroups:
            return (*((p,) for p in samples), *((),) * (subgroups - len(samples)))
        parts = deal_in_turns(sorted(samples, key=self.order.__getitem__), subgroups)
        return tuple(tuple(sorted(part)) for part in parts)


def deal_in_turns(samples: Sequence[int], subgroups: int) -> list[list[int]]:
    """Deals samples, the longest first, to subgroups in turns forth and back."""
    parts: list[list[int]] = [[] for _ in range(subgroups)]
    for turn, p in enumerate(samples):
        number, place = divmod(turn, subgroups)
        parts[subgroups - 1 - place if number % 2 else place].append(p)
    return parts


def _larger(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2])


class PredictedCosts:
    """Predicted costs of the samples of one global batch, and of the next one's from position `own_samples`
    on.

    Where the plan pads to the global batch's widths, every sample has those widths. `known`: values of other
    plans with these samples, symbols and widths; new ones are added.
    """

    def __init__(
        self,
        plan: Plan,
        samples: Sequence[SampleMeta],
        own_samples: int | None = None,
        known: KnownSampleValues | None = None,
    ) -> None:
        self.sample_count = len(samples)
        self._symbols = plan.symbols
        names = samples[0].sizes if samples else {s.name: 0 for s in plan.symbols}
        sizes = pad_sample_sizes(plan, samples, own_samples)
        self.sample_columns = {name: [s[name] for s in sizes] for name in names}
        # The stages of a pipeline mostly share their expressions.
        self._evaluated: KnownSampleValues = {} if known is None else known
        self._evaluated_together: dict[str, dict[tuple[int, ...], int]] = {}  # by expression and micro-batch
        self._subgroup_prices: dict[tuple[str, int], SubgroupPrices] = {}
        # by the user's section and micro-batch: the costs at each stage, None where it is not dealt
        self._dealt: dict[str, dict[tuple[int, ...], list[DealtCosts] | None]] = {}
        stages: dict[str, list[Section]] = {}
        for s in sorted(plan.sections, key=lambda s: s.stage):
            stages.setdefault(s.pipeline, []).append(s)
        self._stages = {s.name: stages[s.pipeline] if s.pipeline else [s] for s in plan.sections}

    def sample_sizes(self, position: int) -> dict[str, int]:
        """Returns the symbol values of the sample at `position` as a micro-batch of its own."""
        return {name: column[position] for name, column in self.sample_columns.items()}

    def micro_batch_sizes(self, positions: Sequence[int]) -> dict[str, int]:
        """Returns the symbol values of a micro-batch of the samples at `positions`."""
        if len(positions) == 1:
            return self.sample_sizes(positions[0])
        return combine_sizes([self.sample_sizes(p) for p in positions], self._symbols)

    def sample_times(self, section: Section, together: int = 1) -> tuple[list[int], list[int]]:
        """Returns (forward, backward) ns of a micro-batch of every sample alone, or `together` with equal
        ones, whether or not it activates the section.
        """
        backward = (
            self._evaluate_for_samples(section.cost.backward_ns, together)
            if owes_backward(section)
            else [0] * self.sample_count
        )
        return self._evaluate_for_samples(section.cost.forward_ns, together), backward

    def shared_sample_times(self, section: Section) -> list[int]:
        """Returns forward plus backward ns of every sample as its share of a full micro-batch of equal
        samples, or of a full part where samples are dealt, whichever is less.
        """
        count = section.micro_batch
        forward, backward = self.sample_times(section, count)
        shares = [(f + b) // count for f, b in zip(forward, backward, strict=True)]
        for subgroup in section.subgroups if section.may_deal else ():
            own = replace(section, cost=subgroup.cost)
            forward, backward = self.sample_times(own, count)
            fits = self.fitting_samples(section, subgroup)
            shares = [
                min(share, subgroup.ranks * (f + b) // (section.mesh.cp * count)) if fit else share
                for share, f, b, fit in zip(shares, forward, backward, fits, strict=True)
            ]
        return shares

    def fitting_samples(self, section: Section, subgroup: SubgroupCost) -> list[bool]:
        """Returns for every sample whether the ranks of a subgroup have the memory to compute it."""
        needed = self.saved_bytes_of_samples(subgroup.cost)
        return [size <= section.subgroup_bytes for size in needed]

    def micro_batch_times(
        self, section: Section, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[int]]:
        """Returns (forward, backward) ns of micro-batches, each a sequence of sample positions. An empty
        micro-batch costs what the expressions give for no rows, a dealt one what its slowest part takes.
        """
        of_sample = self.sample_times(section)
        forward, backward = (
            [ns[samples[0]] if len(samples) == 1 else 0 for samples in micro_batches] for ns in of_sample
        )
        others = [i for i, samples in enumerate(micro_batches) if len(samples) != 1]
        if not others:
            return forward, backward
        joined = [micro_batches[i] for i in others]
        together = self._undealt_times(section, joined)
        for i, f, b, dealt in zip(others, *together, self.price_dealt(section, joined), strict=True):
            forward[i], backward[i] = (f, b) if dealt is None else (dealt.forward_ns, dealt.backward_ns)
        return forward, backward

    def stages_of(self, section: Section) -> Sequence[Section]:
        """Returns all stages of the pipeline of `section`, or the section itself."""
        return self._stages[section.name] if section.pipeline else [section]

    def deal_samples(self, section: Section, micro_batches: Sequence[Sequence[int]]) -> list[SampleParts]:
        """Returns the parts of each micro-batch, () where it is not dealt but divided over all ranks.

        A micro-batch of several samples is dealt, in turns and largest first, to subgroups of the ranks of cp
        if that takes less time or it has more samples than may be divided together, and if each part fits.
        """
        return [
            () if d is None else self._deal_in_turns(section, d.ranks, samples)
            for d, samples in zip(self.price_dealt(section, micro_batches), micro_batches, strict=True)
        ]

    def computed_parts(self, section: Section, samples: Sequence[int]) -> Sequence[Sequence[int]]:
        """Returns the samples that are computed together: all of a micro-batch, or those of each part."""
        (parts,) = self.deal_samples(section, [samples])
        return [part for part in parts if part] or [samples]

    def price_dealt(
        self, section: Section, micro_batches: Sequence[Sequence[int]]
    ) -> list[DealtCosts | None]:
        """Returns the costs of each micro-batch that is dealt, None for others. The subgroups are of the size
        that takes least time, of the smallest such size. All stages of a pipeline deal alike: what they take
        together counts, and each must have the memory."""
        if not section.may_deal:
            return [None] * len(micro_batches)
        stages = self.stages_of(section)
        at = [s.name for s in stages].index(section.name)
        known = self._dealt.setdefault(section.user_section_name, {})
        new = [*dict.fromkeys(m for samples in micro_batches if (m := tuple(samples)) not in known)]
        known |= zip(new, self._price_dealt_at_stages(stages, new), strict=True)
        priced = [known[tuple(samples)] for samples in micro_batches]
        return [None if by_stage is None else by_stage[at] for by_stage in priced]

    def _price_dealt_at_stages(
        self, stages: Sequence[Section], micro_batches: Sequence[tuple[int, ...]]
    ) -> list[list[DealtCosts] | None]:
        """Returns the costs at each stage of each micro-batch that is dealt, None for others."""
        found: list[list[DealtCosts] | None] = [None] * len(micro_batches)
        best = [0] * len(micro_batches)
        for k in range(len(stages[0].subgroups)):
            priced = [self._price_in_subgroups(s, s.subgroups[k], micro_batches) for s in stages]
            for i, by_stage in enumerate(zip(*priced, strict=True)):
                possible = [dealt for dealt in by_stage if dealt is not None]
                ns = sum(dealt.total_ns for dealt in possible)
                if len(possible) == len(stages) and (found[i] is None or ns < best[i]):
                    found[i], best[i] = possible, ns
        may_divide = [
            i
            for i, samples in enumerate(micro_batches)
            if found[i] is not None and len(samples) <= stages[0].micro_batch
        ]
        joined = [micro_batches[i] for i in may_divide]
        divided = [map(int.__add__, *self._undealt_times(s, joined)) for s in stages]
        for i, *ns in zip(may_divide, *divided, strict=True):
            found[i] = found[i] if best[i] < sum(ns) else None
        return found

    def _price_in_subgroups(
        self, section: Section, subgroup: SubgroupCost, micro_batches: Sequence[Sequence[int]]
    ) -> list[DealtCosts | None]:
        """Returns the costs of each micro-batch of several samples, dealt to subgroups of one size, None
        where a part has too many samples or does not fit."""
        count, prices = section.mesh.cp // subgroup.ranks, self.subgroup_prices(section, subgroup.ranks)
        drafts = [
            self._deal_in_turns(section, subgroup.ranks, samples)
            if count < len(samples) <= section.micro_batch * count
            else ()
            for samples in micro_batches
        ]
        self._price_parts(section, subgroup, {part for draft in drafts for part in draft if part})
        found = list[DealtCosts | None]()
        for samples, draft in zip(micro_batches, drafts, strict=True):
            largest = None
            if draft:
                parts = [prices.parts[part] for part in draft if part]
                if all(part.is_possible for part in parts):
                    largest = reduce(_larger, (part[:3] for part in parts))
            elif 1 < len(samples) <= count:
                largest = prices.largest_of(tuple(samples))
            found.append(None if largest is None else DealtCosts(count, subgroup.ranks, *largest))
        return found

    def _deal_in_turns(self, section: Section, ranks: int, samples: Sequence[int]) -> SampleParts:
        """Deals samples to subgroups of `ranks` ranks, by the times of a pipeline's first stage."""
        first = self._stages[section.name][0] if section.pipeline else section
        return self.subgroup_prices(first, ranks).deal_in_turns(samples, section.mesh.cp // ranks)

    def subgroup_prices(self, section: Section, ranks: int) -> SubgroupPrices:
        """Returns the prices of subgroups of `ranks` ranks."""
        key = section.name, ranks
        if key not in self._subgroup_prices:
            subgroup = next(s for s in section.subgroups if s.ranks == ranks)
            times = self.sample_times(replace(section, cost=subgroup.cost))
            saved = self.saved_bytes_of_samples(subgroup.cost)
            self._subgroup_prices[key] = SubgroupPrices(*times, saved, section.subgroup_bytes)
        return self._subgroup_prices[key]

    def _price_parts(
        self, section: Section, subgroup: SubgroupCost, parts: Iterable[tuple[int, ...]]
    ) -> None:
        """Prices parts that were not priced before."""
        priced = self.subgroup_prices(section, subgroup.ranks).parts
        if not (new := [part for part in parts if part not in priced]):
            return
        own, columns = replace(section, cost=subgroup.cost), self.micro_batch_columns(new)
        saved = self.saved_bytes_of_columns(own, columns, len(new))
        possible = [size <= section.subgroup_bytes for size in saved]
        if section.micro_batch_tokens:
            tokens = self.token_counts(section, columns, len(new))
            possible = [
                fits and (len(part) == 1 or n <= section.micro_batch_tokens)
                for fits, part, n in zip(possible, new, tokens, strict=True)
            ]
        times = self.times_of_columns(own, columns, len(new))
        priced |= zip(new, map(PartCosts, *times, saved, possible), strict=True)

    def saved_bytes(self, section: Section, micro_batches: Sequence[Sequence[int]]) -> list[int]:
        """Returns the bytes that each micro-batch keeps from forward to backward; [] without a byte
        budget.
        """
        if not section.room_bytes:
            return []
        of_sample = self.saved_bytes_of_samples(section.cost)
        saved = [of_sample[samples[0]] if len(samples) == 1 else 0 for samples in micro_batches]
        others = [i for i, samples in enumerate(micro_batches) if len(samples) != 1]
        if not others:
            return saved
        joined = [micro_batches[i] for i in others]
        together = self._evaluate_for_micro_batches(section.cost.saved or "0", joined)
        for i, size, dealt in zip(others, together, self.price_dealt(section, joined), strict=True):
            saved[i] = size if dealt is None else dealt.saved_bytes
        return saved

    def split_backwards(self, section: Section, micro_batches: Sequence[Sequence[int]]) -> SplitBackwards:
        """Returns what a split backward adds to each micro-batch. One that would exceed the section's byte
        budget between its parts runs its backward whole."""
        if not section.room_bytes or not section.weight_permille or not section.cost.kept_between:
            return SplitBackwards()
        between = self.bytes_between_parts(section, micro_batches)
        kept = map(int.__add__, self.saved_bytes(section, micro_batches), between)
        whole = [i for i, size in enumerate(kept) if size > section.room_bytes]
        for i in whole:
            between[i] = 0
        return SplitBackwards(between, frozenset(whole))

    def bytes_between_parts(self, section: Section, micro_batches: Sequence[Sequence[int]]) -> list[int]:
        """Returns the bytes that each micro-batch keeps in addition between the parts of a split backward, of
        a dealt one those of the part that keeps most."""
        text = section.cost.kept_between
        if all(len(samples) == 1 for samples in micro_batches):
            of_sample = self._evaluate_for_samples(text)
            return [of_sample[p] for (p,) in micro_batches]
        between = self._evaluate_for_micro_batches(text, micro_batches)
        of_subgroup = {s.ranks: s.cost.kept_between for s in section.subgroups}
        for i, dealt in enumerate(self.price_dealt(section, micro_batches)):
            if dealt is not None:
                parts = [p for p in self._deal_in_turns(section, dealt.ranks, micro_batches[i]) if p]
                columns = self.micro_batch_columns(parts)
                between[i] = max(evaluate_expr_columns(of_subgroup[dealt.ranks], columns, len(parts)))
        return between

    def saved_bytes_of_samples(self, cost: Cost) -> list[int]:
        """Returns the bytes that each sample keeps as a micro-batch of its own in a section of this cost."""
        return self._evaluate_for_samples(cost.saved or "0")

    def saved_bytes_of_columns(self, section: Section, columns: SizeColumns, count: int) -> list[int]:
        """Returns the bytes that each of `count` micro-batches keeps, from columns of symbol values."""
        return evaluate_expr_columns(section.cost.saved or "0", columns, count)

    def token_counts(self, section: Section, columns: SizeColumns, count: int) -> list[int]:
        """Returns the tokens of each of `count` micro-batches, padding included, from columns of symbol
        values."""
        return evaluate_expr_columns(section.token_count, columns, count)

    def micro_batch_columns(self, micro_batches: Sequence[Sequence[int]]) -> dict[str, list[int]]:
        """Returns symbol -> its value for each micro-batch."""
        columns: dict[str, list[int]] = {}
        for s in self._symbols:
            if s.name in self.sample_columns:
                column, combine = self.sample_columns[s.name], sum if s.kind == "rows" else _max_or_zero
                columns[s.name] = [
                    column[samples[0]] if len(samples) == 1 else combine(map(column.__getitem__, samples))
                    for samples in micro_batches
                ]
        return columns

    def is_sum(self, symbol: str) -> bool:
        """Whether the value of a symbol in a micro-batch is the sum over its samples, not the maximum."""
        return next(s.kind for s in self._symbols if s.name == symbol) == "rows"

    def join_columns(self, a: SizeColumns, b: SizeColumns) -> dict[str, list[int]]:
        """Returns the symbol values of micro-batches joined row by row: rows of `a` and `b` add up or take
        the maximum. The shorter column ends the result.
        """
        combine = {s.name: int.__add__ if s.kind == "rows" else max for s in self._symbols}
        return {name: list(map(combine[name], a[name], b[name])) for name in combine if name in a}

    def times_of_columns(
        self, section: Section, columns: SizeColumns, count: int
    ) -> tuple[list[int], list[int]]:
        """Returns (forward, backward) ns of `count` micro-batches, given their symbol values as columns."""
        backward = (
            evaluate_expr_columns(section.cost.backward_ns, columns, count)
            if owes_backward(section)
            else [0] * count
        )
        return evaluate_expr_columns(section.cost.forward_ns, columns, count), backward

    def _undealt_times(
        self, section: Section, micro_batches: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[int]]:
        """Returns (forward, backward) ns of micro-batches that all ranks compute together."""
        backward = section.cost.backward_ns if owes_backward(section) else "0"
        return (
            self._evaluate_for_micro_batches(section.cost.forward_ns, micro_batches),
            self._evaluate_for_micro_batches(backward, micro_batches),
        )

    def _evaluate_for_micro_batches(self, text: str, micro_batches: Sequence[Sequence[int]]) -> list[int]:
        """Returns the value of an expression for each micro-batch. Stages share expressions, and the orders
        that are tried have the same micro-batches, so known values are looked up."""
        known = self._evaluated_together.setdefault(text, {})
        keys: list[tuple[int, ...]] = [tuple(samples) for samples in micro_batches]
        if new := [key for key in dict.fromkeys(keys) if key not in known]:
            known |= zip(
                new, evaluate_expr_columns(text, self.micro_batch_columns(new), len(new)), strict=True
            )
        return list(map(known.__getitem__, keys))

    def _evaluate_for_samples(self, text: str, together: int = 1) -> list[int]:
        """Returns the value of an expression for a micro-batch of `together` equal samples, of every
        sample."""
        if (text, together) not in self._evaluated:
            rows = {s.name for s in self._symbols if s.kind == "rows"} if together > 1 else ()
            columns = {
                name: [together * size for size in column] if name in rows else column
                for name, column in self.sample_columns.items()
            }
            self._evaluated[text, together] = evaluate_expr_columns(text, columns, self.sample_count)
        return self._evaluated[text, together]


def _max_or_zero(values: Iterable[int]) -> int:
    return max(values, default=0)
