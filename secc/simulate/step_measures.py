"""Measures of a simulated step: time against the bounds, busy shares, waits, memory, and hardware
utilisation."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from secc.bounds.bounds import (
    LowerBound,
    micro_batch_bound_of_work,
    one_order_bound_of_work,
    plan_bound_of_work,
    schedule_bound_of_work,
)
from secc.bounds.traffic import Traffic
from secc.bounds.work import BatchWork
from secc.cost.model.memory import RankMemory, reduced_gradients
from secc.runtime.plan.expr_eval import evaluate_expr
from secc.runtime.plan.predicted_costs import PredictedCosts
from secc.runtime.plan.schema import Section
from secc.runtime.plan.step_program import compute_kinds, owes_backward
from secc.runtime.schedule.cross_step_prefetch import edge_tensor_bytes
from secc.simulate.events import SimulatedStep

MicroBatchAmount = Callable[[str, int], int]  # of a section's micro-batch
TimedChange = tuple[int, int]  # time and how much more there is from then on

GIB = 1 << 30


@dataclass(frozen=True)
class SectionShare:
    """A section's part of a step: the share of time, from 0 to 1, for which its `gpus` ranks are busy."""

    busy: float
    gpus: int


@dataclass(frozen=True)
class StepMeasures:
    """Measures of one simulated step, times in seconds.

    exposed_communication_s: mean time that a rank waits for messages and reductions in transit.
    waiting_s: mean time that a rank waits for other ranks to compute.
    in_flight: most micro-batches between forward and backward on any rank.
    one_order_bound_s: the bound on steps in which stages of a pipeline take micro-batches in one order.
    micro_batch_bound_s: the plan bound of plans in which micro-batches have as many samples at most.
    beyond_memory: the rank that holds most beyond what its tensors may take, in words; "" if none does.
    mfu, peak_memory_gib (of the fullest rank): None where the plan does not say enough.
    """

    step_time_s: float
    schedule_bound_s: float
    bound_reason: str
    plan_bound_s: float
    gpus: int
    mfu: float | None
    sections: dict[str, SectionShare]
    exposed_communication_s: float
    waiting_s: float
    in_flight: int
    peak_memory_gib: float | None
    one_order_bound_s: float = 0.0
    micro_batch_bound_s: float = 0.0
    beyond_memory: str = ""


def measure_step(step: SimulatedStep, work: BatchWork | None = None) -> StepMeasures:
    """Measures a simulated step, with the bounds of its plan and samples. work: of its own samples, if it
    is computed already."""
    work = work or BatchWork(step.plan, step.samples[: step.schedule.own_samples], Traffic(step.plan))
    traffic = work.traffic
    bound: LowerBound = schedule_bound_of_work(work)
    exposed, waiting = _total_waits(step)
    ranks = max(1, step.plan.world_size)
    held = _HeldBytes(step, traffic)
    memory = [max((size for _, size in held.over_time(rank) or ()), default=None) for rank in range(ranks)]
    known = [m for m in memory if m is not None]
    return StepMeasures(
        step_time_s=step.end / 1e9,
        schedule_bound_s=bound.ns / 1e9,
        bound_reason=bound.reason,
        plan_bound_s=plan_bound_of_work(work) / 1e9,
        gpus=step.plan.world_size,
        mfu=_model_flops_utilization(step, traffic),
        sections=_section_shares(step),
        exposed_communication_s=exposed / ranks / 1e9,
        waiting_s=waiting / ranks / 1e9,
        in_flight=max(
            (count for rank in range(ranks) for _, count in in_flight_over_time(step, rank)), default=0
        ),
        peak_memory_gib=max(known) / GIB if known and len(known) == ranks else None,
        one_order_bound_s=one_order_bound_of_work(work).ns / 1e9,
        micro_batch_bound_s=micro_batch_bound_of_work(work) / 1e9,
        beyond_memory=_describe_excess(held, memory),
    )


def _describe_excess(held: _HeldBytes, memory: Sequence[int | None]) -> str:
    """The rank that holds most beyond the memory of its device for tensors, and what it holds; "" if none
    does."""
    cluster = held.traffic.cluster
    if cluster is None:
        return ""
    usable = [cluster.view_of_ranks([rank]).device.usable_memory for rank in range(len(memory))]
    excess, rank = max(((size - usable[r], -r) for r, size in enumerate(memory) if size), default=(0, 0))
    if excess <= 0:
        return ""
    own = held.sections_by_rank[-rank]
    names = ", ".join(dict.fromkeys(s.name for s in own))
    limit = usable[-rank]
    return (
        f"rank {-rank} ({names}) holds {(limit + excess) / GIB:.4g} GiB of the {limit / GIB:.4g} GiB that"
        " tensors may take"
    )


def mean_measures(steps: Sequence[StepMeasures], bound: LowerBound) -> StepMeasures:
    """Measures over several steps: means of times, maxima of memory. `bound` is the bound on the mean step
    (`secc.bounds.steady_state`)."""
    n, last = len(steps), steps[-1]
    sections = {
        name: SectionShare(sum(m.sections[name].busy for m in steps) / n, share.gpus)
        for name, share in last.sections.items()
    }
    mfus = [m.mfu for m in steps if m.mfu is not None]
    peaks = [m.peak_memory_gib for m in steps if m.peak_memory_gib is not None]
    return StepMeasures(
        step_time_s=sum(m.step_time_s for m in steps) / n,
        schedule_bound_s=bound.ns / 1e9,
        bound_reason=bound.reason,
        plan_bound_s=sum(m.plan_bound_s for m in steps) / n,
        gpus=last.gpus,
        mfu=sum(mfus) / n if len(mfus) == n else None,
        sections=sections,
        exposed_communication_s=sum(m.exposed_communication_s for m in steps) / n,
        waiting_s=sum(m.waiting_s for m in steps) / n,
        in_flight=max(m.in_flight for m in steps),
        peak_memory_gib=max(peaks) if len(peaks) == n else None,
        one_order_bound_s=sum(m.one_order_bound_s for m in steps) / n,
        micro_batch_bound_s=sum(m.micro_batch_bound_s for m in steps) / n,
        beyond_memory=next((m.beyond_memory for m in steps if m.beyond_memory), ""),
    )


def _section_shares(step: SimulatedStep) -> dict[str, SectionShare]:
    busy: Counter[str] = Counter()
    for c in step.compute:
        busy[c.section] += c.end - c.start
    for s in step.plan.sections:
        if s.pipeline:
            busy[s.pipeline] += busy[s.name]
    ranks = {s.name: len(s.mesh.ranks) for s in step.plan.user_sections}
    return {
        name: SectionShare(busy[name] / (n * step.end) if step.end else 0.0, n) for name, n in ranks.items()
    }


def _total_waits(step: SimulatedStep) -> tuple[int, int]:
    """(waits for messages and reductions in transit, waits for other ranks) summed over the ranks, in ns."""
    exposed = sum(c.start - c.in_transit_from for c in step.compute)
    waiting = sum(c.in_transit_from - c.free_at for c in step.compute)
    late: Counter[int] = Counter()  # by rank
    for r in step.reductions:
        for rank in r.ranks:
            late[rank] += max(0, r.end - max(step.program_ends[rank], r.start))
    for rank, stepped in enumerate(step.program_ends):
        late_reductions = late[rank]
        exposed += late_reductions
        waiting += max(0, step.gradients_summed - stepped - late_reductions)
    return exposed, waiting


@dataclass(frozen=True)
class BusiestRank:
    """The rank that computes longest, which limits the step, and what its step consists of, in seconds.

    exposed_s: waits for messages in transit.
    waiting_s: waits for other ranks to compute.
    closing_s: from its last computation to the end of the step.
    """

    rank: int
    sections: str
    computing_s: float
    waiting_s: float
    exposed_s: float
    closing_s: float


def find_busiest_rank(step: SimulatedStep) -> BusiestRank | None:
    """The busiest rank, None for a step that computes nothing."""
    busy: Counter[int] = Counter()
    for c in step.compute:
        busy[c.rank] += c.end - c.start
    if not busy:
        return None
    rank = max(busy, key=lambda r: (busy[r], -r))
    own = step.compute_by_rank[rank]
    sections = ", ".join(s.name for s in step.plan.sections if rank in s.mesh.ranks)
    waiting = sum(c.in_transit_from - c.free_at for c in own)
    exposed = sum(c.start - c.in_transit_from for c in own)
    closing = step.end - max(c.end for c in own)
    return BusiestRank(rank, sections, busy[rank] / 1e9, waiting / 1e9, exposed / 1e9, closing / 1e9)


def _model_flops_utilization(step: SimulatedStep, traffic: Traffic) -> float | None:
    """FLOPs of the model over the peak of all ranks in the time of the step (MFU)."""
    costs = [s.cost for s in step.plan.sections]
    if traffic.cluster is None or step.end == 0 or not all(c.flops and c.dtype for c in costs):
        return None
    sizes = PredictedCosts(step.plan, step.samples, step.schedule.own_samples)
    busy = 0.0  # ns of one rank at peak
    for s in step.plan.sections:
        peaks = dict(traffic.cluster.view_of_ranks(s.mesh.ranks).device.gflops)
        for m in (m for m in step.schedule.micro_batches[s.name] if not step.schedule.is_of_next_batch(m)):
            for together in sizes.computed_parts(s, m.samples):
                symbols = sizes.micro_batch_sizes(together)
                flops = evaluate_expr(s.cost.flops, symbols) + (
                    evaluate_expr(s.cost.backward_flops or "0", symbols) if s.mode != "forward" else 0
                )
                busy += flops / peaks.get(s.cost.dtype, peaks["f32"])
    return busy / (step.plan.world_size * step.end)


# -- memory over time


def in_flight_over_time(step: SimulatedStep, rank: int) -> list[tuple[int, int]]:
    """(time, micro-batches between the start of their forward and the end of their backward) of a rank, at
    each change."""
    return _running_totals(_in_flight_changes(step, rank, lambda section, micro: 1))


def memory_over_time(
    step: SimulatedStep, rank: int, traffic: Traffic | None = None
) -> list[tuple[int, int]] | None:
    """(time, bytes) on a rank at each change: parameters, gradients, optimizer states, saved activations, and
    prefetched results.

    None where the plan does not say what micro-batches save.
    """
    return _HeldBytes(step, traffic or Traffic(step.plan)).over_time(rank)


class _HeldBytes:
    """What the ranks of a step hold; ranks with the same sections share what is computed for them."""

    def __init__(self, step: SimulatedStep, traffic: Traffic) -> None:
        self.step, self.traffic = step, traffic
        self.sizes = PredictedCosts(step.plan, step.samples, step.schedule.own_samples)
        self.sections = {s.name: s for s in step.plan.sections}
        self.sections_by_rank: dict[int, list[Section]] = defaultdict(list)
        for s in step.plan.sections:
            for rank in s.mesh.ranks:
                self.sections_by_rank[rank].append(s)
        self.parameters: dict[tuple[str, ...], int] = {}
        self.trained: dict[tuple[int, ...], tuple[int, dict[str, _TrainedBytes]]] = {}
        self.saved: dict[tuple[str, int], int] = {}
        self.between: dict[tuple[str, int], int] = {}
        self.running_ahead = _sections_that_run_ahead(step)

    def over_time(self, rank: int) -> list[tuple[int, int]] | None:
        """What `memory_over_time` returns."""
        if any(s.mode != "forward" and not s.cost.saved for s in self.sections_by_rank[rank]):
            return None
        states, trained = self._trained_bytes(rank)
        fixed = self._frozen_bytes(rank) + states + self.traffic.streamed_state_bytes(rank)
        fixed += sum(self._working_bytes(s, rank) for s in self.sections_by_rank[rank])
        changes = [
            *_in_flight_changes(self.step, rank, self._saved_bytes, self._bytes_between),
            *self._gradient_changes(rank, trained),
            *_prefetched_result_changes(self.step, rank, self.sizes, self.running_ahead),
        ]
        return [(0, fixed), *((time, fixed + bytes_) for time, bytes_ in _running_totals(changes))]

    def _saved_bytes(self, section: str, micro: int) -> int:
        """Bytes that a micro-batch keeps from forward to backward."""
        if (section, micro) not in self.saved:
            own, samples = self.sections[section], self.step.schedule.micro_batches[section][micro].samples
            (dealt,) = self.sizes.price_dealt(own, [samples])
            self.saved[section, micro] = (
                dealt.saved_bytes
                if dealt is not None
                else evaluate_expr(own.cost.saved, self.sizes.micro_batch_sizes(samples))
            )
        return self.saved[section, micro]

    def _bytes_between(self, section: str, micro: int) -> int:
        """Bytes that a micro-batch keeps in addition between the parts of a split backward."""
        own, schedule = self.sections[section], self.step.schedule
        if not own.cost.kept_between or micro in schedule.whole_backwards.get(section, ()):
            return 0
        if (section, micro) not in self.between:
            samples = schedule.micro_batches[section][micro].samples
            self.between[section, micro] = self.sizes.bytes_between_parts(own, [samples])[0]
        return self.between[section, micro]

    def _working_bytes(self, section: Section, rank: int) -> int:
        """Bytes that passes of a section need for a time: what the plan counts for it. If that is more, the
        activations on their way to or from host memory of the largest micro-batch, as the rank computes one
        at a time."""
        if not section.cost.streamed:
            return section.working_bytes
        own = {c.micro for c in self.step.compute_by_rank.get(rank, ()) if c.section == section.name}
        held = (self.step.schedule.micro_batches[section.name][i].samples for i in own)
        sizes = [self.sizes.micro_batch_sizes(samples) for samples in held if samples]
        streamed = (evaluate_expr(section.cost.streamed, own_sizes) for own_sizes in sizes)
        return max((section.working_bytes, *streamed))

    def _frozen_bytes(self, rank: int) -> int:
        """Parameters that are not trained; of sharded ones only this rank's part, and two of the layers in
        host memory."""
        held_sections = self.sections_by_rank[rank]
        key = tuple(s.name for s in held_sections)
        if key not in self.parameters:
            trained = {n for n, what in self.step.plan.model.parameters.items() if what.endswith(" train")}
            section_of = {n: s for s in held_sections for n in s.params}
            on_host = [_layer_bytes(self.traffic, s) for s in held_sections if s.offload == "weights"]
            from_host = set(chain.from_iterable(names for names, _ in on_host))
            held = sum(
                self.traffic.bytes_on_rank(name) // (s.mesh.copies if s.sharding == "zero3" else 1)
                for name, s in section_of.items()
                if name not in from_host and name not in trained
            )
            self.parameters[key] = held + sum(2 * largest for _, largest in on_host)
        return self.parameters[key]

    def _trained_bytes(self, rank: int) -> tuple[int, dict[str, _TrainedBytes]]:
        """Trained parameters with their masters and optimizer states on the device, all along; and by section
        the gradients. Those of parameters that several sections hold count with the first of these on the
        rank."""
        groups, traffic = self.traffic.reduction_groups_of(rank), self.traffic
        key = tuple(map(id, groups))
        if key not in self.trained:
            constant, found = 0, dict[str, _TrainedBytes]()
            for held in groups:
                shared, gathered = len(held.ranks), held.sharding == "zero3"
                count = 1 if held.sharding == "none" else shared
                weights = sum(map(traffic.bytes_on_rank, held.names))
                states = sum(traffic.state_bytes(n) for n in held.names if n not in traffic.offloaded_names)
                constant += -(-weights // (count if gathered else 1)) + -(-states // count)
                wide = sum(map(traffic.gradient_bytes_on_rank, held.names))
                own = sum(map(traffic.updated_bytes_on_rank, held.names))
                section = next(s.name for s in self.sections_by_rank[rank] if s.name in held.sections)
                gradients = -(-wide // count) if gathered else own
                is_summed = shared > 1 and not gathered
                summed = _TrainedBytes(
                    gradients,
                    wide if is_summed else 0,
                    own if is_summed else 0,
                    -(-own // count) if is_summed and count > 1 else 0,
                    held.sharding == "zero2",
                )
                found[section] = found.get(section, _TrainedBytes()).combine_with(summed)
            self.trained[key] = constant, found
        return self.trained[key]

    def _gradient_changes(self, rank: int, trained: Mapping[str, _TrainedBytes]) -> Iterator[TimedChange]:
        """Yields changes by the gradients of each section: there from the end of its first backward on, which
        frees activations meanwhile, and summed within its last backward, as `RankMemory` counts both."""
        events = self.step.compute_by_rank.get(rank, ())
        for name, held in trained.items():
            last_kind = compute_kinds(self.sections[name])[-1]
            backwards = [c for c in events if c.section == name and c.kind == last_kind]
            if not backwards or not owes_backward(self.sections[name]):
                continue
            first, last = backwards[0], backwards[-1]
            before = 0 if first is last else held.gradients
            if first is not last:
                yield first.end, held.gradients
            if not held.summed:
                yield from ((last.end, held.gradients - before),)
                continue
            memory = held.rank_memory(len(backwards))
            kept = self._saved_bytes(name, last.micro)
            in_flight = memory.reduced.in_flight_bytes
            early = memory.last_backward_bytes(in_flight, kept) - before - kept
            yield last.start + (last.end - last.start) * in_flight // held.summed, early
            yield last.end, memory.last_backward_bytes(held.summed, 0) - before - early


class _TrainedBytes(NamedTuple):
    """Bytes of a section's trained parameters on a rank: its own `gradients`, all that is `summed` over ranks
    as it is summed, the `bucketed` bytes of these parameters, the rank's `shard` of the sums, and whether own
    gradients are `freed` when their bucket starts."""

    gradients: int = 0
    summed: int = 0
    bucketed: int = 0
    shard: int = 0
    freed: bool = False

    def combine_with(self, other: _TrainedBytes) -> _TrainedBytes:
        """Both together."""
        return _TrainedBytes(
            self.gradients + other.gradients,
            self.summed + other.summed,
            self.bucketed + other.bucketed,
            self.shard + other.shard,
            self.freed or other.freed,
        )

    def rank_memory(self, backwards: int) -> RankMemory:
        """The memory of a rank with `backwards` backwards, as far as it concerns gradients."""
        alone = self.freed and backwards == 1  # then its own gradients exist as the buckets on their way only
        reduced = reduced_gradients(self.summed, self.bucketed, self.shard, self.freed and not alone)
        own = 0 if alone else self.gradients
        return RankMemory(0, own, 0, 0, micro_batches=backwards, reduced=reduced)


def _layer_bytes(traffic: Traffic, section: Section) -> tuple[set[str], int]:
    """The parameters of a section's units, and the bytes of those of the largest layer: their names up to the
    first number after the unit, if any."""
    layers: Counter[str] = Counter()
    names = [n for n in section.params if n.startswith(tuple(f"{unit}." for unit in section.units))]
    for name in names:
        unit = next(unit for unit in section.units if name.startswith(f"{unit}."))
        layer = re.match(r"\.(.*?\.)?\d+(?=\.)", name.removeprefix(unit))
        layers[unit + (layer[0] if layer else "")] += traffic.bytes_on_rank(name)
    return set(names), max(layers.values(), default=0)


def _running_totals(changes_in_any_order: Iterable[TimedChange]) -> list[tuple[int, int]]:
    changes = sorted(changes_in_any_order)
    return [
        (time, total)
        for (time, _), total in zip(changes, accumulate(change for _, change in changes), strict=True)
    ]


def _in_flight_changes(
    step: SimulatedStep,
    rank: int,
    amount: MicroBatchAmount,
    added_amount: MicroBatchAmount = lambda section, micro: 0,
) -> Iterator[TimedChange]:
    """Yields what starts with the forward of a micro-batch and ends with its backward. added_amount: what is
    there in addition from the start of the first part of a split backward on."""
    last = {s.name: compute_kinds(s)[-1] for s in step.plan.sections if owes_backward(s)}
    for c in step.compute_by_rank.get(rank, ()):
        if c.section in last:
            size = amount(c.section, c.micro)
            added = added_amount(c.section, c.micro) if last[c.section] == "W" else 0
            if c.kind == "F":
                yield c.start, size
            if c.kind == "B" and added:
                yield c.start, added
            if c.kind == last[c.section]:
                yield c.end, -size - added


def _sections_that_run_ahead(step: SimulatedStep) -> list[Section]:
    """The sections with results of the step before, or for the next one."""
    schedule = step.schedule
    return [
        s
        for s in step.plan.sections
        if schedule.prefetched.get(s.name)
        or any(map(schedule.is_of_next_batch, schedule.micro_batches[s.name]))
    ]


def _prefetched_result_changes(
    step: SimulatedStep, rank: int, sizes: PredictedCosts, running_ahead: Sequence[Section]
) -> Iterator[TimedChange]:
    """Changes by prefetched results: those of the step before until all are sent, those for the next step
    from their start."""
    for section in (s for s in running_ahead if rank in s.mesh.ranks):
        out = {e.name: e for e in step.plan.edges if e.src == section.name}
        sent: Counter[int] = Counter()
        for t in step.transfers_by_sender.get(rank, ()):
            if t.direction == "fwd" and t.edge in out:
                sent[t.src_micro] = max(sent[t.src_micro], t.end)
        own = step.compute_by_rank.get(rank, ())
        starts = {c.micro: c.start for c in own if c.section == section.name}
        replica = section.mesh.ranks.index(rank) // section.mesh.replica_size
        for m in (m for m in step.schedule.micro_batches[section.name] if m.replica == replica):
            size = sum(edge_tensor_bytes(e, sizes.micro_batch_sizes(m.samples)) for e in out.values())
            if step.schedule.is_prefetched(section.name, m.index) and sent[m.index]:
                yield from ((0, size), (sent[m.index], -size))
            elif step.schedule.is_of_next_batch(m):
                yield starts[m.index], size
