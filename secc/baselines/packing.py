"""Forms the micro-batches of baselines under a token budget, and the order in which replicas take them.

One section, the *anchor* (a language model, a student), has all or most samples. Its micro-batches are packed
first; the other sections take the same samples together, split if they have more replicas. A sample's tokens
are the entries of its labels.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from secc.baselines.layout import count_tokens
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.sample_predicates import is_active
from secc.runtime.plan.schema import Plan, Section
from secc.runtime.plan.step_program import SampleMeta
from secc.runtime.schedule.batch_packing import AssignedMicroBatches, halve_large_micro_batches

ReplicaMicroBatches = list[list[int]]  # of one replica, in their order


@dataclass
class BaselineBatch:
    """One global batch under a plan: tokens and times of its samples, and the whole sections."""

    plan: Plan
    samples: Sequence[SampleMeta]
    sections: dict[str, Section] = field(init=False)  # first stage of each; its replicas count for all stages
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
        """Positions of the samples that pass through a section."""
        return [p for p, s in enumerate(self.samples) if is_active(self.sections[section].when, s.pattern)]

    def replica_count(self, section: str) -> int:
        """Number of replicas of a section."""
        return self.sections[section].mesh.dp

    def token_budget(self, samples: int) -> int:
        """Tokens of `samples` mean samples."""
        return samples * sum(self.tokens) // max(1, len(self.tokens))

    def sample_times(self, section: str) -> list[int]:
        """Ns of each sample in all stages of a section, forward and backward; 0 if it does not pass
        through."""
        on = set(self.active_positions(section))
        times = [0] * len(self.samples)
        for stage in self.plan.pipelines[section]:
            stage_times = zip(*self.costs.sample_times(stage), strict=True)
            times = [
                t + (f + b if p in on else 0)
                for p, (t, (f, b)) in enumerate(zip(times, stage_times, strict=True))
            ]
        return times


def pack_first_fit(positions: Iterable[int], weights: Sequence[int], budget: int) -> ReplicaMicroBatches:
    """First-fit packing: each sample goes into the first micro-batch with enough budget left; one larger
    than the budget is alone."""
    micro_batches: ReplicaMicroBatches = []
    budget_left: list[int] = []
    for p in positions:
        target = next(
            (i for i, tokens_left in enumerate(budget_left) if weights[p] <= tokens_left), len(micro_batches)
        )
        if target == len(micro_batches):
            micro_batches.append([])
            budget_left.append(budget)
        micro_batches[target].append(p)
        budget_left[target] -= weights[p]
    return micro_batches


def assign_longest_first(positions: Iterable[int], weights: Sequence[int], parts: int) -> ReplicaMicroBatches:
    """LPT assignment (Graham): samples over `parts`, the largest first, each to the least loaded part."""
    heap = [(0, 0, i) for i in range(parts)]
    assigned: ReplicaMicroBatches = [[] for _ in range(parts)]
    for p in sorted(positions, key=lambda p: (-weights[p], p)):
        load, count, i = heapq.heappop(heap)
        assigned[i].append(p)
        heapq.heappush(heap, (load + weights[p], count + 1, i))
    return assigned


# -- orders: the anchor's micro-batches and, where they differ, the micro-batches of other sections

PackingOrder = Callable[[BaselineBatch, int], tuple[list[ReplicaMicroBatches], list[ReplicaMicroBatches]]]


def pack_dataset_order(
    batch: BaselineBatch, samples: int
) -> tuple[list[ReplicaMicroBatches], list[ReplicaMicroBatches]]:
    """Samples in dataset order, round-robin over replicas, packed first-fit. Returns (micro-batches of the
    anchor, micro-batches that other sections follow)."""
    positions, dp = batch.active_positions(batch.anchor), batch.replica_count(batch.anchor)
    micro_batches = [
        pack_first_fit(positions[r::dp], batch.tokens, batch.token_budget(samples)) for r in range(dp)
    ]
    return micro_batches, micro_batches


def pack_largest_first(
    batch: BaselineBatch, samples: int
) -> tuple[list[ReplicaMicroBatches], list[ReplicaMicroBatches]]:
    """DistTrain: largest first to the least loaded replica; in a replica small micro-batches first, with
    the p-1 smallest at the end."""
    work = [sum(times) for times in zip(*(batch.sample_times(name) for name in batch.sections), strict=True)]
    tail = len(batch.plan.pipelines[batch.anchor]) - 1
    by_replica: list[ReplicaMicroBatches] = []
    for assigned in assign_longest_first(
        batch.active_positions(batch.anchor), work, batch.replica_count(batch.anchor)
    ):
        packed = pack_first_fit(assigned, batch.tokens, batch.token_budget(samples))
        packed.sort(key=lambda samples_together: sum(work[p] for p in samples_together))
        by_replica.append(packed[tail:] + packed[:tail])
    return by_replica, by_replica


def pack_stratified(
    batch: BaselineBatch, samples: int
) -> tuple[list[ReplicaMicroBatches], list[ReplicaMicroBatches]]:
    """Entrain: micro-batches of equal encoder load; the anchor's excess work is deferred to later, lighter
    micro-batches."""
    anchor_ns = batch.sample_times(batch.anchor)
    encoder_ns = [
        sum(times)
        for times in zip(
            [0] * len(anchor_ns),
            *(batch.sample_times(n) for n in batch.sections if n != batch.anchor),
            strict=True,
        )
    ]
    deferred: list[ReplicaMicroBatches] = []
    by_replica: list[ReplicaMicroBatches] = []
    for assigned in assign_longest_first(
        batch.active_positions(batch.anchor), anchor_ns, batch.replica_count(batch.anchor)
    ):
        count = max(1, -(-sum(batch.tokens[p] for p in assigned) // max(1, batch.token_budget(samples))))
        strata = assign_longest_first([p for p in assigned if encoder_ns[p]], encoder_ns, count)
        by_replica.append(
            [
                stratum
                for stratum in _fill_strata(strata, [p for p in assigned if not encoder_ns[p]], anchor_ns)
                if stratum
            ]
        )
        deferred.append(_defer_excess(by_replica[-1], anchor_ns, encoder_ns))
    return deferred, by_replica


def _fill_strata(
    strata: ReplicaMicroBatches, text_samples: list[int], anchor_ns: Sequence[int]
) -> ReplicaMicroBatches:
    """Adds samples without encoder work such that the anchor's work is balanced."""
    heap = [(sum(anchor_ns[p] for p in stratum), i) for i, stratum in enumerate(strata)]
    heapq.heapify(heap)
    for p in sorted(text_samples, key=lambda p: (-anchor_ns[p], p)):
        load, i = heapq.heappop(heap)
        strata[i].append(p)
        heapq.heappush(heap, (load + anchor_ns[p], i))
    return strata


def _defer_excess(
    micro_batches: ReplicaMicroBatches, anchor_ns: Sequence[int], others: Sequence[int]
) -> ReplicaMicroBatches:
    """Moves samples beyond the mean load to later micro-batches, which have the encoder's results by then."""
    mean = sum(anchor_ns[p] for positions in micro_batches for p in positions) / max(1, len(micro_batches))
    deferred, carried = ReplicaMicroBatches(), list[int]()
    for i, positions in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        kept_now, later, load = list[int](), list[int](), 0
        for p in sorted(positions + carried, key=lambda p: (-anchor_ns[p], p)):
            if last or not kept_now or load + anchor_ns[p] <= mean:
                kept_now.append(p)
                load += anchor_ns[p]
            else:
                later.append(p)
        carried = later
        deferred.append(kept_now)
    return deferred


def cut_micro_batches(
    batch: BaselineBatch, order: PackingOrder, samples: int
) -> dict[str, AssignedMicroBatches]:
    """Micro-batches of every section: the anchor's, round by round over its replicas, and the other sections'
    after it.

    Micro-batches of several samples are halved until a rank's in-flight bytes suffice.
    """
    anchored, followed = order(batch, samples)
    cut_by_section = {batch.anchor: _interleave_replicas(anchored)}
    with_anchor = {p for lots in followed for lot in lots for p in lot}
    for name in batch.sections:
        if name == batch.anchor:
            continue
        active, dp = batch.active_positions(name), batch.replica_count(name)
        members = set(active)
        own_micro_batches = _follow_anchor(
            [[[p for p in lot if p in members] for lot in lots] for lots in followed],
            batch.sample_times(name),
            dp,
        )
        alone = [p for p in active if p not in with_anchor]
        for r in range(dp):
            own_micro_batches[r] += pack_first_fit(alone[r::dp], batch.tokens, batch.token_budget(samples))
        cut_by_section[name] = _interleave_replicas(
            [[lot for lot in lots if lot] for lots in own_micro_batches]
        )
    return {
        name: halve_large_micro_batches(batch.costs, batch.plan.pipelines[name], cut)
        for name, cut in cut_by_section.items()
    }


def _follow_anchor(
    followed: Sequence[ReplicaMicroBatches], times: Sequence[int], dp: int
) -> list[ReplicaMicroBatches]:
    """Micro-batches of `dp` replicas that follow the anchor's: each on one replica, or split over several;
    where neither number of replicas divides the other, the samples of each round are spread evenly."""
    anchors, longest = len(followed), max(map(len, followed), default=0)
    by_replica: list[ReplicaMicroBatches] = [[] for _ in range(dp)]
    for i in range(longest):
        this_round = [(r, lots[i]) for r, lots in enumerate(followed) if i < len(lots)]
        if dp % anchors and anchors % dp:
            for q, spread in enumerate(
                assign_longest_first([p for _, positions in this_round for p in positions], times, dp)
            ):
                by_replica[q].append(spread)
            continue
        for r, positions in this_round:
            replicas_each = max(1, dp // anchors)
            first = r * dp // anchors
            for k in range(replicas_each):
                by_replica[first + k].append(positions[k::replicas_each])
    return by_replica


def _interleave_replicas(by_replica: Sequence[ReplicaMicroBatches]) -> AssignedMicroBatches:
    """(replica, samples): every replica's first micro-batch, then every second one, and so on."""
    longest = max(map(len, by_replica), default=0)
    return [
        (r, tuple(micro_batches[i]))
        for i in range(longest)
        for r, micro_batches in enumerate(by_replica)
        if i < len(micro_batches)
    ]
