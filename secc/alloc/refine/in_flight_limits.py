"""Limits the micro-batches of a section between forward and backward on a rank, by number and by bytes.

Numbers are chosen for mean samples. The limit in bytes keeps a step within memory whatever its samples are,
and is the only one of sections without stages that run ahead.
It is the bytes that the memory estimate counted for that number of mean micro-batches (or for the largest
sample alone), plus an equal share of the memory that the rank has left.
"""

from __future__ import annotations

from dataclasses import dataclass

from secc.alloc.problem.candidate_memory import candidate_memory, stage_in_flight_limit
from secc.alloc.problem.closed_form import PlanValue
from secc.alloc.problem.in_flight import divide_in_flight_room, in_flight_alternating, least_in_flight
from secc.alloc.problem.types import Assignment, Problem, ReplicaShape
from secc.alloc.problem.workload import Workload
from secc.cost.model.memory import RankMemory


@dataclass(frozen=True)
class InFlightLimit:
    """At most `in_flight` micro-batches (0: unlimited) of at most `size_bytes` bytes together (0:
    unlimited)."""

    in_flight: int = 0
    size_bytes: int = 0


def in_flight_limit(
    work: Workload, asked: Problem, assignment: Assignment, value: PlanValue, section: str, stage: int = 0
) -> InFlightLimit:
    """Limit of a section, or of one stage of its pipeline, under an assignment with closed-form value
    `value`."""
    group, c = assignment.group, asked.sections[section][assignment.choice[section]]
    work_on_kind = work.for_kind(c.kind)
    load = work_on_kind.rank_load(work_on_kind.loads[section], c.shape, stage=stage)
    if load.mode == "forward":
        return InFlightLimit()
    same_group = [(s, i) for s, i in assignment.choice.items() if group[s] == group[section]]
    feeds_other_ranks = any(e.src == section and group[e.dst] != group[section] for e in asked.edges)
    others = value.memory[group[section]] - (c.memory_ahead if feeds_other_ranks else c.memory)
    count = (
        c.in_flight
        if feeds_other_ranks
        else stage_in_flight_limit(work_on_kind, load, c, stage, others)
        if c.pp > 1
        else 0
    )
    # Stages that share a rank count parts of micro-batches; what the rank has room for does not depend on it.
    counted = count if c.chunks == 1 and count else in_flight_alternating(work_on_kind, load, c.micro_batches)
    shares_with_others = section in work_on_kind.producing_sections and any(
        asked.sections[s][i].stage_ranks != c.stage_ranks for s, i in same_group
    )
    # The device's room for bytes says nothing about activations in host memory, nor about each of several
    # stages.
    is_bounded_by_bytes = c.pp == 1 and c.offload != "activations"
    if (count and feeds_other_ranks and is_bounded_by_bytes) or (not count and shares_with_others):
        # The section does all forwards first (`SectionGraph.runs_ahead`), as far as bytes allow: of a drawn
        # batch, some ranks have more micro-batches than expected.
        count = work_on_kind.global_batch
    holders = sum(
        group[s] == group[section] and load.mode != "forward" for s, load in work_on_kind.loads.items()
    )
    rank = candidate_memory(work_on_kind, load, c)
    size = in_flight_bytes(work_on_kind, rank, counted, others, holders)
    return InFlightLimit(count, divide_in_flight_room(c.shape, stage, size, rank.largest_sample // c.chunks))


def subgroup_limit(
    work: Workload,
    asked: Problem,
    assignment: Assignment,
    value: PlanValue,
    section: str,
    prefetched: int,
    stage: int = 0,
) -> int:
    """Bytes that a rank of cp may need for samples that its subgroup computes: its room in flight, of a stage
    that of one of the micro-batches that it holds; without a backward what the largest sample needs, and an
    equal share of the memory that its rank has left besides `prefetched` bytes, if no section there has a
    backward."""
    group, c = assignment.group, asked.sections[section][assignment.choice[section]]
    limit = in_flight_limit(work, asked, assignment, value, section, stage)
    if limit.size_bytes:
        return bytes_of_one(limit, c.shape, stage)
    own = work.for_kind(c.kind)
    rank = candidate_memory(own, own.rank_load(own.loads[section], c.shape, stage=stage), c)
    needed = rank.activation_bytes(1) + rank.working
    together = [s for s in group if group[s] == group[section]]
    if any(own.loads[s].mode != "forward" for s in together):
        return needed
    free_bytes = own.cluster.device.usable_memory - value.memory[group[section]] - prefetched
    return needed + max(0, free_bytes) // len(together)


def bytes_of_one(limit: InFlightLimit, shape: ReplicaShape, stage: int) -> int:
    """Bytes that one micro-batch of a stage may take if as many fit as the limit allows, or as 1F1B has in
    flight."""
    if shape.pp == 1:
        return limit.size_bytes
    return limit.size_bytes // (limit.in_flight or least_in_flight(shape.pp, shape.chunks, stage))


def in_flight_bytes(work: Workload, rank: RankMemory, in_flight: int, others: int, holders: int) -> int:
    """Bytes for `in_flight` micro-batches, plus an equal share, for each of `holders` sections, of the
    memory left on a rank where other sections use `others` bytes.

    If all micro-batches of the step are in flight at once, mean ones leave room for the gradients when the
    first of them ends. Drawn ones may be smaller, so all gradients count here, and less is in flight where
    these would not fit.
    """
    usable, held = work.cluster.device.usable_memory, rank.activation_bytes(in_flight)
    free_bytes = usable - others - rank.total_bytes(in_flight)
    if 1 < rank.micro_batches <= in_flight:
        free_bytes = min(free_bytes, usable - others - rank.fixed - rank.gradients - held)
        if free_bytes < 0:
            return max(held + free_bytes, rank.activation_bytes(1))
    return held + max(0, free_bytes) // holders
