"""Certified lower bounds on step time: no order of the samples, and no assignment to replicas, can be faster.

The *schedule bound* holds for the plan's allocation: the ranks of each section, and the most samples in a
micro-batch. The *plan bound* holds for every plan with the same layouts (degrees, recomputation, backwards
that are split where they fit the plan's room, and all else that the work of a sample depends on) on as
many devices, however many replicas there are and micro-batches are formed, as far as those of several samples
leave what they keep for the backward on a rank: all work, at the least that each sample can add, spread
evenly, or the longest way of one sample through all its sections and back, without messages. Those two hold
whoever shares ranks. As secc's sections share all of their ranks or none, what whole replicas, the ends of
pipelines and gradient sums take under that rule counts as well (`secc/bounds/allocations.py`). Plans with
other layouts may beat it; `secc.alloc.explain.least_step` bounds those. With *its micro-batches*, the plan
bound is about plans in which these have at most as many samples as in the plan; what takes time once in a
micro-batch then counts more.
These bounds assume only that a micro-batch takes at least as long as each of its samples alone, and at least
the sum of their weights (`secc/bounds/additive.py`). A `SampleVisit` is a sample's forward and backward in
one section; its *head* and *tail* are the times that must pass before its start and after its end
(`secc/bounds/work.py`).

A *pool* is a set of q0 ranks on which the work of some sections must be done: the ranks of one section, of
sections that share ranks, or all ranks. Let S be any set of jobs of these sections (whole visits, or their
forwards or backwards alone) of weight w, head h and tail t, and let T be the step time.

*Sets.* Some number q <= q0 of ranks have jobs of S. On each of them nothing of S starts before the head of
its first job of S, and the step ends no sooner than the tail of its last job after that job's end; all its
work of S lies in between. So T >= h + work + t there. (A micro-batch starts when all its samples may, and its
work is at least its samples' weights, so this holds for micro-batches of several samples, too.) The first
jobs of the q ranks are different jobs, and so are the last ones. Summed over these ranks:

    q T >= sum of w over S + the q smallest heads + the q smallest tails.

The bound is the minimum over q, because ranks may stay idle. Heads and tails of visits are those of the
forward's start and of the backward's end, which are on the same rank. The sets that are tried are prefixes:
of the largest weights, heads, tails, and heads and tails together.

*Packing.* Of the k q0 + 1 largest jobs some rank has at least k + 1, which take at least as long as the k + 1
smallest of them. So T >= min h + that + min t, with the minima over these jobs.

*Chain.* T >= h + duration + t of every job: the longest path through one sample's own work.

*Even.* A replica of several ranks occupies all of them while it works. The ranks' times sum to at most T
each, so T is at least all that work over the number of ranks: the plan bound. Pools do not imply it where
replicas of different widths share ranks, so it is also applied to such ranks alone.

Heads, tails and chains include messages between ranks at their fastest, and tails include the reduction of
the section's gradients. Its sums begin within the last backward of the section on a rank, one after the
other, so at least their time less the longest backward comes after it, and at least the last bucket. After
the last reduction every rank waits for all others (the global norm) and then takes its optimizer step: the
longest of these adds to any bound. What short last backwards leave of the sums of all replicas is bounded in
`secc/bounds/gradient_sums.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from secc.bounds.allocations import allocation_bound, stages_of_sections
from secc.bounds.gradient_sums import stage_works
from secc.bounds.machine_bounds import BoundJob, best_set_bound, job_families, last_tail, packing_bound
from secc.bounds.pipeline_bounds import (
    has_in_flight_slots,
    hold_times,
    keeps_one_order,
    long_sample_bound,
    one_order_bound,
    round_trip_times,
    takes_single_samples,
)
from secc.bounds.work import BatchWork
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta


@dataclass(frozen=True)
class LowerBound:
    """A lower bound on a step in ns, and the argument and sections that it rests on, as text."""

    ns: int
    reason: str


def schedule_bound(plan: Plan, samples: Sequence[SampleMeta]) -> LowerBound:
    """Returns the largest bound for one global batch under the plan's allocation.

    Where sections prefetch for the next step, it is the bound of a step among steps with the same batch
    (`secc/bounds/steady_state.py`).
    """
    return schedule_bound_of_work(BatchWork(plan, samples))


def schedule_bound_of_work(work: BatchWork) -> LowerBound:
    """`schedule_bound` of work that is computed already."""
    even = LowerBound(_even_work_ns(work, own_sizes=True), "all work, spread evenly over all ranks")
    others = LowerBound(micro_batch_bound_of_work(work), "all work, in any numbers of whole replicas")
    found = [bound_without_prefetch(work), *prefetch_work_bounds(work), even, others]
    return max(found, key=lambda b: b.ns)


@lru_cache(maxsize=8)  # a step's own bound and the mean over steps ask for it
def bound_without_prefetch(work: BatchWork) -> LowerBound:
    """Bound on a step of the sections that do not prefetch."""
    until_optimizer = bound_until_optimizer(work)
    return LowerBound(until_optimizer.ns + _update_ns(work), until_optimizer.reason)


def _update_ns(work: BatchWork) -> int:
    """Ns that a step takes at least once all gradients are reduced, with its overheads."""
    optimizer_ns = max((work.traffic.least_optimizer_ns(r) for r in range(work.plan.world_size)), default=0)
    return optimizer_ns + work.traffic.overheads.step_ns(len(work.samples))


def one_order_bound_of_work(work: BatchWork) -> LowerBound:
    """`bound_without_prefetch` for steps in which the stages of each pipeline take the micro-batches of a
    replica in one order, forwards and backwards, as in the scheduler's orders."""
    best, update_ns = bound_without_prefetch(work), _update_ns(work)
    for name, stages in work.plan.pipelines.items():
        if keeps_one_order(work, stages):
            least = max(0, best.ns - update_ns)
            if (ns := one_order_bound(work, stages, least)) > least:
                best = LowerBound(ns + update_ns, f"the way back of long samples through {name} in one order")
    return best


def prefetch_work_bounds(work: BatchWork) -> list[LowerBound]:
    """For each set of ranks with prefetching sections: one global batch's work there, spread evenly."""
    ranks = {name: frozenset(work.replica_ranks[name]) for name in work.prefetching}
    return [
        LowerBound(
            -(-sum(u.forward_weight for n in names for u in work.visits[n]) // len(pool)),
            f"the work of {', '.join(names)}, ahead or not",
        )
        for pool in sorted(set(ranks.values()), key=sorted)
        if (names := sorted(n for n, where in ranks.items() if where <= pool))
    ]


def bound_until_optimizer(work: BatchWork) -> LowerBound:
    """Bound on the time until all gradients are reduced."""
    best = max(_all_bounds(work), key=lambda b: b.ns)
    for name, stages in work.plan.pipelines.items():
        if takes_single_samples(stages):
            with_long_samples = long_sample_bound(work, stages, best.ns)
            best = (
                LowerBound(with_long_samples, f"the longest samples on the ranks of {name}")
                if with_long_samples > best.ns
                else best
            )
    return best


def plan_bound(plan: Plan, samples: Sequence[SampleMeta]) -> int:
    """Ns that the global batch takes at least in the plan's layouts: its work if all ranks share it evenly
    and never wait, the longest way of one sample, or what whole replicas and the ends of pipelines take in
    every allocation."""
    return plan_bound_of_work(BatchWork(plan, samples))


def plan_bound_of_work(work: BatchWork) -> int:
    """`plan_bound` of work that is computed already."""
    return allocation_bound(work, max(_even_work_ns(work), work.longest_way_ns()), own_sizes=False)


@lru_cache(maxsize=8)  # the schedule bound and measures ask for it
def micro_batch_bound_of_work(work: BatchWork) -> int:
    """The plan bound of plans in which micro-batches have at most as many samples as in this one."""
    least = max(_even_work_ns(work, own_sizes=True), work.longest_way_ns())
    return allocation_bound(work, least, own_sizes=True)


def _even_work_ns(work: BatchWork, own_sizes: bool = False) -> int:
    """Ns that all work takes if all ranks share it evenly. own_sizes: in micro-batches of at most as many
    samples as in the plan."""
    # All tp ranks of a replica are busy for its whole work.
    total = sum(sum(work.least_work(s.name, own_sizes)) * s.mesh.replica_size for s in work.sections)
    return -(-total // max(1, work.plan.world_size))


def _all_bounds(work: BatchWork) -> Iterator[LowerBound]:
    """Yields the bounds by chains, sets, packing, even spread and in-flight limits."""
    yield LowerBound(max(_chain_lengths(work), default=0), "the longest way of one sample")
    for ranks, sections in _rank_pools(work, work.replica_ranks):
        where = ", ".join(sections)
        units = [u for name in sections for u in work.visits[name]]
        for what, jobs in job_families(units):
            yield LowerBound(best_set_bound(jobs, ranks), f"{what} on the ranks of {where}")
            yield LowerBound(packing_bound(jobs, ranks), f"the largest {what} on the ranks of {where}")
    tps = {s.name: s.mesh.replica_size for s in work.sections}
    for ranks, sections in _rank_pools(work, {s.name: s.mesh.ranks for s in work.sections}):
        if len({tps[name] for name in sections}) > 1:
            total = sum(
                job.weight * tps[name]
                for name in sections
                for job in next(job_families(work.visits[name]))[1]
            )
            yield LowerBound(
                -(-total // ranks),
                f"all work on the ranks of {', '.join(sections)}, which wide replicas hold together",
            )
    for name, stages in stages_of_sections(work.plan).items():
        for stage, stage_work in stage_works(work, work.visits, stages, own_sizes=True):
            closing = work.traffic.closing_times(stage)
            yield LowerBound(
                stage_work.bound_time(stage.mesh.dp, closing), f"the work and the gradient sums of {name}"
            )
    trips = round_trip_times(work)
    for section in work.sections:
        if has_in_flight_slots(work, section):
            units, slots = work.visits[section.name], section.in_flight * section.mesh.dp
            jobs = [
                BoundJob(hold, u.forward_head, last_tail(u))
                for u, hold in zip(units, hold_times(work, section, trips), strict=True)
            ]
            yield LowerBound(
                max(best_set_bound(jobs, slots), packing_bound(jobs, slots)),
                f"the in-flight limit of {section.name}",
            )


def _chain_lengths(work: BatchWork) -> Iterator[int]:
    """Yields the length of each sample's path through a section."""
    for name, units in work.visits.items():
        for u in units if name not in work.prefetching else ():
            yield u.forward_head + u.forward + u.forward_tail


def _rank_pools(work: BatchWork, where: Mapping[str, Sequence[int]]) -> list[tuple[int, list[str]]]:
    """(number of ranks, sections that run there and nowhere else) of each pool; `where` has the ranks of
    sections."""
    sets = {frozenset(ranks) for name, ranks in where.items() if name not in work.prefetching}
    components = set(sets)
    while overlapping := next(((a, b) for a in components for b in components if a != b and a & b), None):
        components = components - set(overlapping) | {overlapping[0] | overlapping[1]}
    names = [s.name for s in work.sections if s.name not in work.prefetching]
    pools = sets | components | {frozenset().union(*sets)}
    sections_of_pool = {pool: [n for n in names if pool.issuperset(where[n])] for pool in pools}
    return sorted((len(pool), names) for pool, names in sections_of_pool.items())
