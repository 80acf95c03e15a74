"""What the report shows of one simulated step, as plain data; `secc.simulate.step_figures` makes it.

The page's own script draws the timeline from JSON, in which a step of a thousand ranks has to be small. So
times are whole ticks, a bar follows the one before it in its row, and what it computes is one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What a bar of the timeline does, if it computes nothing; greater numbers are computations.
MESSAGE_WAIT_CODE, REDUCTION_CODE, OPTIMIZER_CODE, FIRST_COMPUTATION_CODE = range(4)
COMPUTATION_KINDS = "FBW"  # forward, backward (to inputs), weight gradients of a split backward


@dataclass(frozen=True)
class TimePart:
    """Mean seconds of a step in which ranks do `what`; `section` is the user's section that they compute, ""
    for everything else."""

    section: str
    what: str
    seconds: float


@dataclass(frozen=True)
class RankTimes:
    """Ranks with the same sections, and the parts of their step; the parts add up to the step."""

    ranks: tuple[int, ...]
    sections: tuple[str, ...]
    parts: tuple[TimePart, ...]


@dataclass(frozen=True)
class StepFigures:
    """One simulated step.

    timeline: JSON values
      ns_per_tick, end (ticks), left_out (ranks without a row);
      sections: [name, index of the user's section] of each section or stage;
      micros: [section or stage, replica, number in the section, [samples]] of each micro-batch;
      rows: {label, ranks, bars}, where `bars` has three numbers for each bar: ticks since the end of the bar
      before it (negative where both overlap), length in ticks, and a code. Codes below
      FIRST_COMPUTATION_CODE are waits, reductions and the optimizer; the others are FIRST_COMPUTATION_CODE +
      3 * micro-batch + index in COMPUTATION_KINDS;
      edges: [source, destination, whether a gradient flows back] with indices of sections or stages;
      samples: [number, optional inputs] of each sample.
    """

    seconds: float
    times: tuple[RankTimes, ...]
    timeline: dict[str, Any]
