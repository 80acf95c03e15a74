"""Prices ways to run a section on a cluster: step time, fill and drain times, and memory of a `Candidate`."""

from __future__ import annotations

from dataclasses import replace

from secc.alloc.problem.candidate_memory import candidate_memory, host_bytes, memory_on_rank
from secc.alloc.problem.in_flight import (
    IN_FLIGHT_FOR_LOCAL_CONSUMERS,
    in_flight_alternating,
    most_in_flight_on_rank,
)
from secc.alloc.problem.micro_batch_times import (
    busiest_replica_ns,
    deferred_backward_ns,
    expect_micro_batches,
    pipeline_bubble_ns,
)
from secc.alloc.problem.parameter_update import update_ns
from secc.alloc.problem.section_load import BusiestReplica, SectionLoad
from secc.alloc.problem.types import Candidate
from secc.alloc.problem.workload import Workload
from secc.cost.model.memory import RankMemory, rank_memory

PLAIN_CANDIDATE = Candidate(dp=1, micro_batch=1, time_ns=0)
# A section may fill all or half of a rank's memory with micro-batches that wait for consumers on other ranks.
IN_FLIGHT_MEMORY_DIVISORS = (1, 2)


def price_candidate(
    work: Workload, load: SectionLoad, dp: int, size: int, sharding: str = "none", recompute: str = "none"
) -> Candidate:
    """Computes times and memory of a section in `dp` replicas with micro-batches of `size` samples."""
    busy = busiest_replica_ns(work, load, dp, size, sharding, recompute)
    rank = memory_on_rank(work, load, dp, size, sharding, recompute, busy.micro_batches)
    alternating = in_flight_alternating(work, load, busy.micro_batches)
    return _make_candidate(
        work, load, dp, size, sharding, recompute, busy, rank, alternating, rank.total_bytes(alternating)
    )


def with_sample_limit(work: Workload, load: SectionLoad, c: Candidate, most: int) -> Candidate:
    """The candidate with micro-batches of up to `most` samples where these are short: what passes need for a
    time counts for `most` mean samples. `load` is that of a rank."""
    limited = replace(c, sample_limit=most)
    before, after = (candidate_memory(work, load, one) for one in (c, limited))
    alternating = in_flight_alternating(work, load, c.micro_batches)

    def added_bytes(in_flight: int) -> int:
        return max(0, after.total_bytes(in_flight) - before.total_bytes(in_flight))

    return replace(
        limited,
        memory=c.memory + added_bytes(alternating),
        memory_ahead=c.memory_ahead + added_bytes(c.in_flight or alternating),
    )


def fixed_memory_fits(load: SectionLoad, dp: int, sharding: str, offload: str, capacity: int) -> bool:
    """Whether parameters, gradients and optimizer states alone fit into `capacity` bytes of a rank."""
    copies = dp * load.shape.cp
    return any(
        rank_memory(load.cost, 0, dp=copies, sharding=sharding, micro_batches=n, offload=offload).total_bytes(
            1
        )
        <= capacity
        for n in (1, 2)
    )


def price_fitting_candidates(
    work: Workload, load: SectionLoad, dp: int, size: int, sharding: str, recompute: str, capacity: int | None
) -> list[Candidate]:
    """Prices a candidate and its variants with fewer micro-batches in flight (`in_flight_variants`).

    Returns an empty list if it needs more than `capacity` bytes on a rank (None: unlimited).
    """
    _, count, _ = expect_micro_batches(load, -(-work.active_sample_count(load) // dp), size)
    rank = memory_on_rank(work, load, dp, size, sharding, recompute, count)
    alternating = in_flight_alternating(work, load, count)
    alternating_bytes = rank.total_bytes(alternating)
    if capacity is not None and alternating_bytes > capacity:
        return []
    if capacity is not None and host_bytes(work, load, rank) > work.cluster.device.usable_host_memory:
        return []
    busy = busiest_replica_ns(work, load, dp, size, sharding, recompute)
    candidate = _make_candidate(
        work, load, dp, size, sharding, recompute, busy, rank, alternating, alternating_bytes
    )
    return _vary_in_flight(work, load, candidate, rank)


def time_without_update_ns(
    work: Workload, load: SectionLoad, dp: int, size: int, sharding: str, recompute: str
) -> int:
    """Ns that a rank computes in a step, or waits for other stages in the middle of it, without gradient sums
    and the optimizer."""
    busy = busiest_replica_ns(work, load, dp, size, sharding, recompute)
    if load.mode == "forward" or load.shape.pp == 1:
        return busy.total_ns
    bubble = pipeline_bubble_ns(load, size, busy, recompute)
    return busy.total_ns + bubble // work.cluster.device.framework.virtual_stages


def micro_batches_held(work: Workload, load: SectionLoad, dp: int, size: int) -> tuple[int, int]:
    """(2 if a rank sums the gradients of several micro-batches of `size` samples, else 1; micro-batches that
    it holds while it alternates forwards and backwards). With the same figures memory grows with `size`."""
    _, count, _ = expect_micro_batches(load, -(-work.active_sample_count(load) // dp), size)
    return min(count, 2), in_flight_alternating(work, load, count)


def _make_candidate(
    work: Workload,
    load: SectionLoad,
    dp: int,
    size: int,
    sharding: str,
    recompute: str,
    busy: BusiestReplica,
    rank: RankMemory,
    alternating: int,
    alternating_bytes: int,
) -> Candidate:
    """Builds a candidate from prices: `busy` has the times of its busiest replica, `rank` the memory of one
    rank by purpose, `alternating` the micro-batches that it holds while it alternates forwards and backwards,
    and `alternating_bytes` the bytes on it meanwhile."""
    total, micro_batches, fill, drain = busy
    framework = work.cluster.device.framework
    bubble = pipeline_bubble_ns(load, size, busy, recompute) // framework.virtual_stages
    if load.shape.pp == 2:
        bubble += framework.waits_of_two_stages * (fill + drain)
    return PLAIN_CANDIDATE.with_fields(
        dp=dp,
        micro_batch=size,
        time_ns=total + bubble + update_ns(work, load, dp, sharding, recompute, busy),
        fill_ns=load.stages.sum_over(fill),
        drain_ns=load.stages.sum_over(drain - deferred_backward_ns(load, drain, recompute)),
        micro_batches=micro_batches,
        memory=alternating_bytes,
        memory_ahead=alternating_bytes
        if load.mode == "forward" or alternating == micro_batches
        else rank.total_bytes(micro_batches),
        in_flight=0 if load.mode == "forward" else micro_batches,
        recompute=recompute,
        tp=load.shape.tp,
        pp=load.shape.pp,
        cp=load.shape.cp,
        ep=load.shape.ep,
        backward_parts=load.shape.backward_parts,
        chunks=load.shape.chunks,
        placement=load.shape.placement,
        norms=load.shape.norms,
        sharding=sharding,
        idle_ns=bubble if load.mode == "forward" else 0,
        offload=load.shape.offload,
        host_memory=host_bytes(work, load, rank),
    )


def in_flight_variants(work: Workload, load: SectionLoad, c: Candidate) -> list[Candidate]:
    """Variants of a candidate with all its micro-batches in flight, and with as many as fit into all and into
    half of a rank's memory.

    With fewer micro-batches in flight than a step has, the in-flight budget is used in several rounds; each
    round waits until consumers on other ranks return gradients.
    """
    return _vary_in_flight(work, load, c, candidate_memory(work, load, c))


def _vary_in_flight(work: Workload, load: SectionLoad, c: Candidate, rank: RankMemory) -> list[Candidate]:
    """Returns the `in_flight_variants` of a candidate, given the memory of a rank."""
    if not c.in_flight or load.name not in work.producing_sections:
        return [c]
    least = min(c.micro_batches, max(most_in_flight_on_rank(load.shape), IN_FLIGHT_FOR_LOCAL_CONSUMERS))
    capacity = work.cluster.device.usable_memory
    by_in_flight = {c.micro_batches: c}
    for part in IN_FLIGHT_MEMORY_DIVISORS:
        rounds, count, size = 1, c.micro_batches, c.memory_ahead
        while size > capacity // part and count > least:
            rounds *= 2
            count = max(least, -(-c.micro_batches // rounds))
            size = rank.total_bytes(count)
        if count < c.micro_batches:
            by_in_flight[count] = c.with_fields(
                in_flight=count, memory_ahead=size, rounds=-(-c.micro_batches // count)
            )
    return list(by_in_flight.values())
