"""Measures overheads of ranks (`secc.cluster.Overheads`) in steps that they really train.

The model is compiled for processes of this machine, with separate sections if possible, and trained for some
steps with a trace. Time of a rank's program outside of forwards, backwards and messages is overhead of its
jobs. Scheduling, gradient norm and optimizer have trace events of their own. Phases that all ranks run
together (metadata, totals) count as long as on the rank that arrives last, because it does not wait. Figures
are medians over the steps after warm-up, scaled to the processor speed at which blocks were timed
(`secc.profile.speed_gauge`).
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
    """One step of one rank: its duration, and duration and number of its trace events by kind."""

    total_ns: float
    ns_by_kind: Mapping[str, float]
    count_by_kind: Mapping[str, int]


def measure_overheads(model: Path, ranks: int, costs: Path, gauge_ns: int = 0) -> Overheads:
    """Train a model for some steps on `ranks` processes of this machine, and measure their overheads.

    model: the model file. costs: file of measured costs. gauge_ns: time of the speed gauge when blocks were
    timed, to which the result is scaled; 0 for no scaling. Raises UserError if the model cannot be compiled
    or trained.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan, trace = Path(folder) / "plan", Path(folder) / "trace.json"
        compiled = _compile_for_profile(model, ranks, costs)
        compiled.write_plan(plan, lambda _: "")
        step_times = train_plan(
            plan, compiled.plan.world_size, PROFILED_STEPS, Path(folder), ["--trace", str(trace)]
        )
        overheads = overheads_from_trace(
            json.loads(trace.read_text(encoding="utf-8"))["traceEvents"], compiled.plan
        )
        run_gauge_ns = step_times.mean_gauge_ns(WARMUP_STEPS) or gauge_ns or 1
        return scale_overheads(overheads, gauge_ns / run_gauge_ns or 1.0)


def scale_overheads(overheads: Overheads, factor: float) -> Overheads:
    """The overheads on a processor that takes `factor` times as long."""
    return replace(
        overheads,
        **{
            name: round(factor * getattr(overheads, name))
            for name in ("job", "message", "tensor", "sample", "step")
        },
    )


def _compile_for_profile(model: Path, ranks: int, costs: Path) -> CompiledPlan:
    """Compile the model for processes of this machine, with separate sections if there are enough ranks."""
    options = CompileOptions(cluster=f"local:{ranks}", costs=str(costs))
    try:
        return compile_model(model, replace(options, strategy="apart"))
    except UserError:
        return compile_model(model, options)


def overheads_from_trace(events: Sequence[TraceEvent], plan: Plan) -> Overheads:
    """Compute the overheads from the trace events of a run of `plan`. The message overhead is that of the
    plan's cluster if the run sends no message."""
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
            / max(1, sum(s.count_by_kind[k] for s in ranks for k in COMPUTE_KINDS))
            for ranks in steps
        ),
        message=_median_ns(sent) if sent else assumed.message,
        tensor=_tensor_overhead_ns(steps, Traffic(plan)),
        sample=_median_ns(max(s.ns_by_kind["PLAN"] for s in ranks) / plan.global_batch for ranks in steps),
        step=_median_ns(_step_overhead_ns(ranks) for ranks in steps),
        label="measured",
    )


def _steps_of_rank(events: Sequence[TraceEvent], rank: int) -> Iterator[_RankStep]:
    """The steps of a rank, each from the start of its program to the start of the next one."""
    rank_events = sorted(
        (e for e in events if e.get("pid") == rank and e.get("ph") == "X" and e["tid"] == 0),
        key=lambda e: e["ts"],
    )
    starts = [e["ts"] for e in rank_events if e["cat"] == "PROGRAM"]
    for start, stop in pairwise(starts):
        ns_by_kind, count_by_kind = defaultdict[str, float](float), Counter[str]()
        for e in rank_events:
            if start <= e["ts"] < stop:
                ns_by_kind[e["cat"]] += e["dur"] * 1e3
                count_by_kind[e["cat"]] += 1
        yield _RankStep((stop - start) * 1e3, ns_by_kind, count_by_kind)


def _program_overhead_ns(step: _RankStep) -> float:
    """Time of a rank's program outside of jobs and messages."""
    return step.ns_by_kind["PROGRAM"] - sum(
        step.ns_by_kind[kind] for kind in (*COMPUTE_KINDS, *MESSAGE_KINDS)
    )


def _step_overhead_ns(ranks: Sequence[_RankStep]) -> float:
    """Time in synchronized phases on the rank that waits least, plus time outside of all events."""
    outside_events = min(s.total_ns - sum(s.ns_by_kind[phase] for phase in STEP_PHASES) for s in ranks)
    return outside_events + sum(min(s.ns_by_kind[phase] for s in ranks) for phase in SYNCHRONIZED_PHASES)


def _tensor_overhead_ns(steps: Sequence[Sequence[_RankStep]], traffic: Traffic) -> int:
    """Time per parameter of norm and optimizer beyond memory traffic, on the rank where it is largest."""
    overheads = [0]
    for rank in range(traffic.plan.world_size):
        if count := len(traffic.updated_parameters(rank)):
            update_ns = _median_ns(
                sum(ranks[rank].ns_by_kind[kind] for kind in UPDATE_PHASES) for ranks in steps
            )
            overheads.append(max(0, update_ns - traffic.optimizer_memory_ns(rank)) // count)
    return max(overheads)


def _median_ns(values: Iterable[float]) -> int:
    """The median in integer nanoseconds, at least 0."""
    return max(0, round(median(values)))
