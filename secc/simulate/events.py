"""What happens in a simulated step, as plain data. All times are integer ns since the step's start."""

from __future__ import annotations

from dataclasses import dataclass

from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta, Schedule


@dataclass(frozen=True, slots=True)
class Compute:
    """F or B of a micro-batch on a rank, which was free from `free` on; from `waited` on it waited for
    nothing but a message on its way."""

    rank: int
    kind: str
    section: str
    replica: int
    stage: int
    micro: int
    free: int
    waited: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message: posted by its sender at `sent`, on its way from `start` to `end`."""

    edge: str
    direction: str
    src_micro: int
    dst_micro: int
    src: int
    dst: int
    samples: tuple[int, ...]
    size: int
    sent: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Reduction:
    """The sum of gradients that sections hold in common, over their ranks."""

    sections: tuple[str, ...]
    ranks: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Simulated:
    """One simulated step.

    `stepped`: when each rank reached the end of its program; `synced`: when all gradients were summed; `end`:
    when the step ends.
    """

    plan: Plan
    samples: tuple[SampleMeta, ...]
    schedule: Schedule
    compute: tuple[Compute, ...]
    transfers: tuple[Transfer, ...]
    reductions: tuple[Reduction, ...]
    stepped: tuple[int, ...]
    synced: int
    end: int
