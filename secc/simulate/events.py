"""Events of a simulated step, as plain data. All times are integer ns since the start of the step."""

from __future__ import annotations

from dataclasses import dataclass

from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta, Schedule


@dataclass(frozen=True, slots=True)
class ComputeEvent:
    """F, B or W of a micro-batch on a rank.

    free_at: when the rank became free.
    in_transit_from: from here until `start` the rank waited only for a message in transit; before, for
        other ranks to compute.
    """

    rank: int
    kind: str
    section: str
    replica: int
    stage: int
    micro: int
    free_at: int
    in_transit_from: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TransferEvent:
    """A message: posted by its sender at `posted_at`, in transit from `start` to `end`."""

    edge: str
    direction: str
    src_micro: int
    dst_micro: int
    src: int
    dst: int
    samples: tuple[int, ...]
    size: int
    posted_at: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ReductionEvent:
    """Reduction of gradients that sections hold in common, over their ranks."""

    sections: tuple[str, ...]
    ranks: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SimulatedStep:
    """One simulated step.

    program_ends: when each rank reached the end of its program.
    gradients_summed: when all gradients were reduced.
    end: end of the step.
    """

    plan: Plan
    samples: tuple[SampleMeta, ...]
    schedule: Schedule
    compute: tuple[ComputeEvent, ...]
    transfers: tuple[TransferEvent, ...]
    reductions: tuple[ReductionEvent, ...]
    program_ends: tuple[int, ...]
    gradients_summed: int
    end: int
