"""What happens in a simulated step, as plain data. All times are integer ns since the step's start."""

from __future__ import annotations

from dataclasses import dataclass

from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta, Schedule


@dataclass(frozen=True, slots=True)
class ComputeEvent:
    """F or B of a micro-batch on a rank, which was free from `free` on; from `waited` on it waited for
    nothing but a message on its way."""

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
    """A message: posted by its sender at `sent`, on its way from `start` to `end`."""

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
    """The sum of gradients that sections hold in common, over their ranks."""

    sections: tuple[str, ...]
    ranks: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SimulatedStep:
    """One simulated step.

    `stepped`: when each rank reached the end of its program; `synced`: when all gradients were summed; `end`:
    when the step ends.
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
