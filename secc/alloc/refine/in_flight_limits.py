"""What the micro-batches of a section may hold on a rank between forward and backward: how many, and how many
bytes.

Numbers are chosen for mean samples; bytes are what keeps a step within memory whatever its samples are. They
are what that number of mean micro-batches, or the largest sample alone, was counted with, and an even part of
what the rank has left.
"""

from __future__ import annotations

from dataclasses import dataclass

from secc.alloc.problem.candidates import Workload, in_turn, room_of, stage_room
from secc.alloc.problem.closed_form import Value
from secc.alloc.problem.types import Assignment, Problem
from secc.cost.model.memory import Memory


@dataclass(frozen=True)
class Room:
    """`in_flight` micro-batches (0: any number) of `size` bytes (0: any) together."""

    in_flight: int = 0
    size: int = 0


def room(
    work: Workload, asked: Problem, assignment: Assignment, value: Value, section: str, stage: int = 0
) -> Room:
    """The room of a section, or of one stage of its pipeline, under an assignment of this value."""
    group, c = assignment.group, asked.sections[section][assignment.choice[section]]
    own = work.on(c.kind)
    load = own.on_rank(own.loads[section], c.tp, c.pp)
    if load.mode == "forward":
        return Room()
    together = [(s, i) for s, i in assignment.choice.items() if group[s] == group[section]]
    apart = any(e.src == section and group[e.dst] != group[section] for e in asked.edges)
    number = c.in_flight if apart else stage_room(own, load, c, stage) if c.pp > 1 else 0
    few = number or in_turn(own, load, c.micro_batches)
    if not number and section in own.sources and any(asked.sections[s][i].tp != c.tp for s, i in together):
        number = own.global_batch  # it does its forwards first (`Graph.runs_ahead`), as far as bytes allow
    others = value.memory[group[section]] - (c.memory_ahead if apart else c.memory)
    holders = sum(group[s] == group[section] and load.mode != "forward" for s, load in own.loads.items())
    return Room(number, size(own, room_of(own, load, c), few, others, holders))


def size(work: Workload, rank: Memory, in_flight: int, others: int, holders: int) -> int:
    """Bytes for so many micro-batches and a part of what is left on a rank that has `others` beside, one for
    each of `holders`."""
    left = work.cluster.device.usable - others - rank.total(in_flight)
    return rank.kept(in_flight) + max(0, left) // holders
