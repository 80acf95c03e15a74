"""Events of a simulated step, as plain data. All times are integer ns since the start of the step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

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

    @cached_property
    def compute_by_rank(self) -> dict[int, list[ComputeEvent]]:
        """The computations of each rank that has any, in the order of `compute`."""
        found: defaultdict[int, list[ComputeEvent]] = defaultdict(list)
        for event in self.compute:
            found[event.rank].append(event)
        return dict(found)

    @cached_property
    def transfers_by_sender(self) -> dict[int, list[TransferEvent]]:
        """The messages that each rank sends, in the order of `transfers`."""
        found: defaultdict[int, list[TransferEvent]] = defaultdict(list)
        for event in self.transfers:
            found[event.src].append(event)
        return dict(found)
