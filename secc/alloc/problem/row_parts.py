"""Decides which cp (ranks that share the rows of sequences) are considered for a section.

Every further cp multiplies the candidates, and gains something only where single samples are long. A sample
is long for a replica if its activations take more than `LONG_SAMPLE_MEMORY` of a rank's memory, or if its
time is more than `LONG_SAMPLE_TIME` times the work that each replica has on average: the other replicas then
wait for it. As long as that is so with half as many ranks, a cp is considered.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from secc.alloc.problem.candidate_memory import longest_sample_bytes
from secc.alloc.problem.pins import Pins
from secc.alloc.problem.section_load import SectionLoad
from secc.alloc.problem.size_spread import PERMILLE
from secc.alloc.problem.types import ReplicaShape
from secc.alloc.problem.workload import Workload

LONG_SAMPLE_MEMORY = Fraction(1, 2)
LONG_SAMPLE_TIME = 2
MAX_ROW_PARTS = 32  # the largest cp that is considered without a pin


def row_part_choices(
    work: Workload, load: SectionLoad, pins: Pins, tp: int, pp: int, ranks: int, free: bool
) -> Sequence[int]:
    """The cp to consider for stages of `tp` ranks and `pp` stages: the pinned one, else with `free` powers of
    two as long as samples are long."""
    if pins.pinned_number(load.name, "cp") is not None:
        return pins.number_choices(load.name, "cp", ())
    splittable = free and pins.pinned_number(load.name, "ep") is None
    choices = row_parts_for_long_samples(work, load, tp, pp, ranks) if splittable else [1]
    return pins.number_choices(load.name, "cp", choices)


def row_parts_for_long_samples(work: Workload, load: SectionLoad, tp: int, pp: int, ranks: int) -> list[int]:
    """1, and powers of two as long as samples are long for replicas with half as many ranks."""
    choices, cp = [1], 2
    while (
        cp <= MAX_ROW_PARTS
        and tp * pp * cp <= ranks
        and _has_long_sample(work, load, ReplicaShape(tp, pp, cp // 2), ranks)
        and work.has_rows_to_share(load)
    ):
        choices.append(cp)
        cp *= 2
    return choices


def _has_long_sample(work: Workload, load: SectionLoad, shape: ReplicaShape, ranks: int) -> bool:
    """Whether the longest listed sample is long for replicas of this shape."""
    longest = next(iter(load.spread.relative_times), 0)
    replicas = ranks // shape.ranks
    if longest * replicas > LONG_SAMPLE_TIME * PERMILLE * work.active_sample_count(load):
        return True
    kept = longest_sample_bytes(work, work.rank_load(load, shape), "none")
    return kept > LONG_SAMPLE_MEMORY * work.cluster.device.usable_memory
