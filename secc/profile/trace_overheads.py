"""What ranks do beside computing, measured in steps that they train for real (`secc.cluster.Overheads`).

The model is compiled for processes of this machine, sections apart where they can be, and trained for some
steps with a trace. What a rank's program takes beside its forwards, backwards and messages is overhead of its
jobs. Planning, the optimizer and the norm have events of their own. What all ranks do together (metadata,
totals) lasts as long as on the rank that comes to it last, which waits for nobody. Figures are medians over
the steps behind the first ones, at the processor's speed at which blocks were timed (`secc.profile.speed_gauge`).
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from secc.bounds.traffic import Traffic
from secc.cluster import Overheads
from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.errors import UserError
from secc.profile.measured_training import train_plan
from secc.runtime.plan.schema import Plan

PROFILED_STEPS, WARMUP_STEPS = 20, 4
COMPUTE_KINDS, MESSAGE_KINDS, SYNCHRONIZED_PHASES = ("F", "B", "W"), ("SEND", "RECV"), ("METADATA", "TOTALS")
UPDATE_PHASES = ("NORM", "OPTIMIZER")
STEP_PHASES = ("METADATA", "PLAN", "PROGRAM", "GRADIENTS", "NORM", "TOTALS", "OPTIMIZER", "GAUGE")

TraceEvent = Mapping[str, Any]


@dataclass(frozen=True)
class _RankStep:
    """One step of one rank, in ns: all of it, the sums of its events by kind, and how many there were."""

    total_ns: float
    ns_by_kind: Mapping[str, float]
    count_by_kind: Mapping[str, int]


def measure_overheads(model: Path, ranks: int, costs: Path, gauge_ns: int = 0) -> Overheads:
    """Train a model for some steps on `ranks` processes here. Raises UserError where it cannot be compiled or
    trained.

    `gauge_ns` is what the gauge took when blocks were timed: at that speed of the processor overheads are
    given (0: as they are).
    """
    with tempfile.TemporaryDirectory() as folder:
        plan, trace = Path(folder) / "plan", Path(folder) / "trace.json"
        compiled = _compile_for_profile(model, ranks, costs)
        compiled.write_plan(plan, lambda _: "")
        trained = train_plan(
            plan, compiled.plan.world_size, PROFILED_STEPS, Path(folder), ["--trace", str(trace)]
        )
        found = overheads_from_trace(json.loads(trace.read_text())["traceEvents"], compiled.plan)
        return scale_overheads(
            found, gauge_ns / (trained.mean_gauge_ns(WARMUP_STEPS) or gauge_ns or 1) or 1.0
        )


def scale_overheads(found: Overheads, slower: float) -> Overheads:
    """The same on a processor that takes so many times as long."""
    return replace(
        found,
        **{
            name: round(slower * getattr(found, name))
            for name in ("job", "message", "tensor", "sample", "step")
        },
    )


def _compile_for_profile(model: Path, ranks: int, costs: Path) -> CompiledPlan:
    """The model for processes of this machine; sections apart, so that messages pass, where there are ranks
    enough."""
    options = CompileOptions(cluster=f"local:{ranks}", costs=str(costs))
    try:
        return compile_model(model, replace(options, strategy="apart"))
    except UserError:
        return compile_model(model, options)


def overheads_from_trace(events: Sequence[TraceEvent], plan: Plan) -> Overheads:
    """The overheads in the trace of a run of `plan`. One that the run has no example of is as the plan's
    cluster assumes it."""
    steps = list(
        zip(
            *(list(_steps_of_rank(events, rank))[WARMUP_STEPS:] for rank in range(plan.world_size)),
            strict=True,
        )
    )
    assumed = Traffic(plan).overheads
    sent = [e["dur"] * 1e3 for e in events if e.get("cat") == "SEND"]
    return Overheads(
        job=_median_ns(
            sum(map(_program_overhead_ns, ranks))
            / max(1, sum(s.count[k] for s in ranks for k in COMPUTE_KINDS))
            for ranks in steps
        ),
        message=_median_ns(sent) if sent else assumed.message,
        tensor=_tensor_overhead_ns(steps, Traffic(plan)),
        sample=_median_ns(max(s.spent["PLAN"] for s in ranks) / plan.global_batch for ranks in steps),
        step=_median_ns(_step_overhead_ns(ranks) for ranks in steps),
        label="measured",
    )


def _steps_of_rank(events: Sequence[TraceEvent], rank: int) -> Iterator[_RankStep]:
    """The steps of a rank, each from the start of its program to that of the next one."""
    own = sorted(
        (e for e in events if e.get("pid") == rank and e.get("ph") == "X" and e["tid"] == 0),
        key=lambda e: e["ts"],
    )
    starts = [e["ts"] for e in own if e["cat"] == "PROGRAM"]
    for start, stop in pairwise(starts):
        spent, count = defaultdict[str, float](float), Counter[str]()
        for e in own:
            if start <= e["ts"] < stop:
                spent[e["cat"]] += e["dur"] * 1e3
                count[e["cat"]] += 1
        yield _RankStep((stop - start) * 1e3, spent, count)


def _program_overhead_ns(step: _RankStep) -> float:
    """What a rank's program takes beside its jobs and messages."""
    return step.ns_by_kind["PROGRAM"] - sum(
        step.ns_by_kind[kind] for kind in (*COMPUTE_KINDS, *MESSAGE_KINDS)
    )


def _step_overhead_ns(ranks: Sequence[_RankStep]) -> float:
    """What all do together, on the rank that waits least, and what is in no event."""
    rest = min(s.total_ns - sum(s.ns_by_kind[phase] for phase in STEP_PHASES) for s in ranks)
    return rest + sum(min(s.ns_by_kind[phase] for s in ranks) for phase in SYNCHRONIZED_PHASES)


def _tensor_overhead_ns(steps: Sequence[Sequence[_RankStep]], traffic: Traffic) -> int:
    """For each parameter, what the norm and the optimizer take beyond memory's part, on the rank where that
    is most."""
    found = [0]
    for rank in range(traffic.plan.world_size):
        if count := len(traffic.updated_parameters(rank)):
            spent = _median_ns(sum(ranks[rank].ns_by_kind[kind] for kind in UPDATE_PHASES) for ranks in steps)
            found.append(max(0, spent - traffic.optimizer_memory_ns(rank)) // count)
    return max(found)


def _median_ns(values: Iterable[float]) -> int:
    """The middle value in whole ns, none below 0."""
    return max(0, round(median(values)))
