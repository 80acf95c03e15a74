"""Micro-batches of baselines: samples packed under a token budget, and the order in which replicas take them.

One section, the *anchor*, has all or most samples (a language model, a student). Its micro-batches are packed
first; the other sections take the same samples together, split where they have more replicas. A sample's
tokens are the entries of its labels.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from secc.baselines.layout import count_tokens
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import SampleMeta, is_active
from secc.runtime.schedule.batch_packing import AssignedMicroBatches, halve_large_micro_batches

ReplicaMicroBatches = list[list[int]]  # of one replica, in their order


@dataclass
class BaselineBatch:
    """One global batch under a plan: tokens and times of its samples, and the sections in whole."""

    plan: Plan
    samples: Sequence[SampleMeta]
    sections: dict[str, Section] = field(init=False)  # the first stage of each, whose replicas count for all
    anchor: str = field(init=False)
    tokens: list[int] = field(init=False)
    costs: PredictedCosts = field(init=False)

    def __post_init__(self) -> None:
        self.sections = {name: stages[0] for name, stages in self.plan.pipelines.items()}
        self.anchor = max(
            self.sections,
            key=lambda name: (len(self.active_positions(name)), list(self.sections).index(name)),
        )
        self.costs = PredictedCosts(self.plan, self.samples)
        self.tokens = [count_tokens(self.plan, s.sizes) for s in self.samples]

    def active_positions(self, section: str) -> list[int]:
        """The positions of the samples that pass through a section."""
        return [p for p, s in enumerate(self.samples) if is_active(self.sections[section].when, s.pattern)]

    def replica_count(self, section: str) -> int:
        return self.sections[section].mesh.dp

    def token_budget(self, samples: int) -> int:
        """The tokens of so many mean samples."""
        return samples * sum(self.tokens) // max(1, len(self.tokens))

    def sample_times(self, section: str) -> list[int]:
        """Ns of each sample in a section (all its stages), forward and backward, 0 where it does not pass
        through."""
        on = set(self.active_positions(section))
        found = [0] * len(self.samples)
        for stage in self.plan.pipelines[section]:
            both = zip(*self.costs.sample_times(stage), strict=True)
            found = [
                t + (f + b if p in on else 0) for p, (t, (f, b)) in enumerate(zip(found, both, strict=True))
            ]
        return found


def pack_first_fit(positions: Iterable[int], weights: Sequence[int], budget: int) -> ReplicaMicroBatches:
    """Each sample into the first lot that has room for it; one that is larger than the budget has a lot of
    its own."""
    lots: ReplicaMicroBatches = []
    room: list[int] = []
    for p in positions:
        place = next((i for i, left in enumerate(room) if weights[p] <= left), len(lots))
        if place == len(lots):
            lots.append([])
            room.append(budget)
        lots[place].append(p)
        room[place] -= weights[p]
    return lots


def assign_longest_first(positions: Iterable[int], weights: Sequence[int], parts: int) -> ReplicaMicroBatches:
    """The samples over `parts`: the largest first, each to where least is."""
    heap = [(0, 0, i) for i in range(parts)]
    found: ReplicaMicroBatches = [[] for _ in range(parts)]
    for p in sorted(positions, key=lambda p: (-weights[p], p)):
        load, count, i = heapq.heappop(heap)
        found[i].append(p)
        heapq.heappush(heap, (load + weights[p], count + 1, i))
    return found


# -- orders: the anchor's lots and, where they differ, those that the other sections follow

PackingOrder = Callable[[BaselineBatch, int], tuple[list[ReplicaMicroBatches], list[ReplicaMicroBatches]]]


def pack_dataset_order(
    batch: BaselineBatch, samples: int
) -> tuple[list[ReplicaMicroBatches], list[ReplicaMicroBatches]]:
    """Samples as the dataset has them, to the replicas in turn, packed first-fit."""
    positions, dp = batch.active_positions(batch.anchor), batch.replica_count(batch.anchor)
    lots = [pack_first_fit(positions[r::dp], batch.tokens, batch.token_budget(samples)) for r in range(dp)]
    return lots, lots


def pack_largest_first(
    batch: BaselineBatch, samples: int
) -> tuple[list[ReplicaMicroBatches], list[ReplicaMicroBatches]]:
    """DistTrain: the largest first onto the least loaded replica; in a replica small micro-batches first, the
    p-1 smallest at the end."""
    work = [sum(times) for times in zip(*(batch.sample_times(name) for name in batch.sections), strict=True)]
    tail = len(batch.plan.pipelines[batch.anchor]) - 1
    lots: list[ReplicaMicroBatches] = []
    for dealt in assign_longest_first(
        batch.active_positions(batch.anchor), work, batch.replica_count(batch.anchor)
    ):
        packed = pack_first_fit(dealt, batch.tokens, batch.token_budget(samples))
        packed.sort(key=lambda lot: sum(work[p] for p in lot))
        lots.append(packed[tail:] + packed[:tail])
    return lots, lots


def pack_stratified(
    batch: BaselineBatch, samples: int
) -> tuple[list[ReplicaMicroBatches], list[ReplicaMicroBatches]]:
    """Entrain: micro-batches of equal encoder load; what the anchor has too much of waits for later, lighter
    ones."""
    own = batch.sample_times(batch.anchor)
    others = [
        sum(times)
        for times in zip(
            [0] * len(own), *(batch.sample_times(n) for n in batch.sections if n != batch.anchor), strict=True
        )
    ]
    deferred: list[ReplicaMicroBatches] = []
    lots: list[ReplicaMicroBatches] = []
    for dealt in assign_longest_first(
        batch.active_positions(batch.anchor), own, batch.replica_count(batch.anchor)
    ):
        count = max(1, -(-sum(batch.tokens[p] for p in dealt) // max(1, batch.token_budget(samples))))
        strata = assign_longest_first([p for p in dealt if others[p]], others, count)
        lots.append([lot for lot in _fill_strata(strata, [p for p in dealt if not others[p]], own) if lot])
        deferred.append(_defer_excess(lots[-1], own, others))
    return deferred, lots


def _fill_strata(strata: ReplicaMicroBatches, rest: list[int], own: Sequence[int]) -> ReplicaMicroBatches:
    """Samples without encoder work level the anchor's."""
    heap = [(sum(own[p] for p in lot), i) for i, lot in enumerate(strata)]
    heapq.heapify(heap)
    for p in sorted(rest, key=lambda p: (-own[p], p)):
        load, i = heapq.heappop(heap)
        strata[i].append(p)
        heapq.heappush(heap, (load + own[p], i))
    return strata


def _defer_excess(
    lots: ReplicaMicroBatches, own: Sequence[int], others: Sequence[int]
) -> ReplicaMicroBatches:
    """The lots with what exceeds the mean left to later ones, which have the encoder's results by then."""
    mean = sum(own[p] for lot in lots for p in lot) / max(1, len(lots))
    found, waiting = ReplicaMicroBatches(), list[int]()
    for i, lot in enumerate(lots):
        last = i == len(lots) - 1
        kept, later, load = list[int](), list[int](), 0
        for p in sorted(lot + waiting, key=lambda p: (-own[p], p)):
            if last or not kept or load + own[p] <= mean:
                kept.append(p)
                load += own[p]
            else:
                later.append(p)
        waiting = later
        found.append(kept)
    return found


def cut_micro_batches(
    batch: BaselineBatch, order: PackingOrder, samples: int
) -> dict[str, AssignedMicroBatches]:
    """The micro-batches of every section: the anchor's, round by round over the replicas, and the others'
    after it.

    Those of several samples are halved until a rank has room for them.
    """
    anchored, followed = order(batch, samples)
    found = {batch.anchor: _interleave_replicas(anchored)}
    passed = {p for lots in followed for lot in lots for p in lot}
    for name in batch.sections:
        if name == batch.anchor:
            continue
        on, dp = batch.active_positions(name), batch.replica_count(name)
        members = set(on)
        mine = _follow_anchor(
            [[[p for p in lot if p in members] for lot in lots] for lots in followed],
            batch.sample_times(name),
            dp,
        )
        alone = [p for p in on if p not in passed]
        for r in range(dp):
            mine[r] += pack_first_fit(alone[r::dp], batch.tokens, batch.token_budget(samples))
        found[name] = _interleave_replicas([[lot for lot in lots if lot] for lots in mine])
    return {
        name: halve_large_micro_batches(batch.costs, batch.plan.pipelines[name], cut)
        for name, cut in found.items()
    }


def _follow_anchor(
    followed: Sequence[ReplicaMicroBatches], times: Sequence[int], dp: int
) -> list[ReplicaMicroBatches]:
    """The lots of `dp` replicas: each lot of the anchor on one replica, or split over several; where neither
    number of replicas divides the other, each round's samples spread evenly."""
    anchors, longest = len(followed), max(map(len, followed), default=0)
    mine: list[ReplicaMicroBatches] = [[] for _ in range(dp)]
    for i in range(longest):
        now = [(r, lots[i]) for r, lots in enumerate(followed) if i < len(lots)]
        if dp % anchors and anchors % dp:
            for q, spread in enumerate(assign_longest_first([p for _, lot in now for p in lot], times, dp)):
                mine[q].append(spread)
            continue
        for r, lot in now:
            several = max(1, dp // anchors)
            first = r * dp // anchors
            for k in range(several):
                mine[first + k].append(lot[k::several])
    return mine


def _interleave_replicas(lots: Sequence[ReplicaMicroBatches]) -> AssignedMicroBatches:
    """(replica, lot): every replica's first lot, then every second one, and so on."""
    longest = max(map(len, lots), default=0)
    return [(r, tuple(own[i])) for i in range(longest) for r, own in enumerate(lots) if i < len(own)]
