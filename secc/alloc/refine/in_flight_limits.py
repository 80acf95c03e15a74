"""What the micro-batches of a section may hold on a rank between forward and backward: how many, and how many
bytes.

Numbers are chosen for mean samples; bytes are what keeps a step within memory whatever its samples are. They
are what that number of mean micro-batches, or the largest sample alone, was counted with, and an even part of
what the rank has left.
"""

from __future__ import annotations

from dataclasses import dataclass

from secc.alloc.problem.candidates import (
    Workload,
    candidate_memory,
    in_flight_alternating,
    stage_in_flight_limit,
)
from secc.alloc.problem.closed_form import PlanValue
from secc.alloc.problem.types import Assignment, Problem
from secc.cost.model.memory import RankMemory


@dataclass(frozen=True)
class InFlightLimit:
    """`in_flight` micro-batches (0: any number) of `size` bytes (0: any) together."""

    in_flight: int = 0
    size_bytes: int = 0


def in_flight_limit(
    work: Workload, asked: Problem, assignment: Assignment, value: PlanValue, section: str, stage: int = 0
) -> InFlightLimit:
    """The room of a section, or of one stage of its pipeline, under an assignment of this value."""
    group, c = assignment.group, asked.sections[section][assignment.choice[section]]
    own = work.for_kind(c.kind)
    load = own.rank_load(own.loads[section], c.tp, c.pp)
    if load.mode == "forward":
        return InFlightLimit()
    together = [(s, i) for s, i in assignment.choice.items() if group[s] == group[section]]
    apart = any(e.src == section and group[e.dst] != group[section] for e in asked.edges)
    number = c.in_flight if apart else stage_in_flight_limit(own, load, c, stage) if c.pp > 1 else 0
    few = number or in_flight_alternating(own, load, c.micro_batches)
    if (
        not number
        and section in own.producing_sections
        and any(asked.sections[s][i].tp != c.tp for s, i in together)
    ):
        number = own.global_batch  # it does its forwards first (`Graph.runs_ahead`), as far as bytes allow
    others = value.memory[group[section]] - (c.memory_ahead if apart else c.memory)
    holders = sum(group[s] == group[section] and load.mode != "forward" for s, load in own.loads.items())
    return InFlightLimit(number, in_flight_bytes(own, candidate_memory(own, load, c), few, others, holders))


def in_flight_bytes(work: Workload, rank: RankMemory, in_flight: int, others: int, holders: int) -> int:
    """Bytes for so many micro-batches and a part of what is left on a rank that has `others` beside, one for
    each of `holders`."""
    left = work.cluster.device.usable_memory - others - rank.total_bytes(in_flight)
    return rank.activation_bytes(in_flight) + max(0, left) // holders
