"""Counts micro-batches in flight: those between forward and backward on a rank or stage at one time."""

from __future__ import annotations

from functools import cache

from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.types import ReplicaShape
from secc.alloc.problem.workload import Workload
from secc.runtime.plan.schema import rank_position

# Micro-batches in flight of a section with consumers on its own ranks: one waits for them, the next runs.
IN_FLIGHT_FOR_LOCAL_CONSUMERS = 2

# Micro-batches in flight of a pipeline for each of its stages, where memory allows.
IN_FLIGHT_PER_STAGE = 2


def in_flight_alternating(work: Workload, load: SectionLoad, micro_batches: int) -> int:
    """Number of micro-batches between forward and backward where a rank alternates them (1F1B). Stages of
    several chunks on a rank count in parts of one."""
    return min(
        micro_batches,
        max(
            most_in_flight_on_rank(load.shape),
            IN_FLIGHT_FOR_LOCAL_CONSUMERS if load.name in work.producing_sections else 1,
        ),
    )


@cache  # asked for by every candidate of a shape
def most_in_flight_on_rank(shape: ReplicaShape) -> int:
    """The number of whole micro-batches that the fullest rank holds if each of its stages holds its least
    number (`least_in_flight`)."""
    held = [0] * shape.pp
    for stage in range(shape.stages):
        place = rank_position(stage, shape.pp, shape.placement)
        held[place] += least_in_flight(shape.pp, shape.chunks, stage)
    return -(-max(held) // shape.chunks)


def least_in_flight(pp: int, chunks: int, stage: int) -> int:
    """The number of micro-batches that a stage must be able to hold: one for itself and each later stage
    (1F1B). A stage of several on its rank takes a part of the rank's time, so fewer micro-batches start
    before the first one returns; one more hides what other chunks delay."""
    following = pp * chunks - stage
    return following if chunks == 1 else -(-following // chunks) + 1


def divide_in_flight_room(shape: ReplicaShape, stage: int, room: int, largest: int = 0) -> int:
    """Returns what a stage gets of `room`, bytes or micro-batches that its rank may hold in flight.

    Of several stages on a rank, the earlier one holds a micro-batch longer, and more of them at once; each
    gets a part in proportion to the least number that it must be able to hold, but no less than the largest
    sample takes if there is room for it on each of them.
    """
    on_rank = shape.stages_on_rank(stage)
    weights = {s: least_in_flight(shape.pp, shape.chunks, s) for s in on_rank}
    least = largest if largest * len(on_rank) <= room else 0
    part, weights_left = room, sum(weights.values())
    for s in sorted(on_rank, key=lambda s: (weights[s], s)):
        part = max(least, -(-room * weights[s] // weights_left))
        room, weights_left = room - part, weights_left - weights[s]
        if s == stage:
            break
    return part
